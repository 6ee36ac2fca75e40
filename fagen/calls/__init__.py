"""From a call's tensors to a result: what they mean, the kernel for them, the short way of the next call."""
