// context.h: leaving one stack and going on with another.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__x86_64__) || defined(FAGEN_UCONTEXT)
#include <ucontext.h>
#endif

#if defined(__x86_64__) && !defined(FAGEN_UCONTEXT)

struct Context {
  void* stack_pointer = nullptr;

  void start(char* low, char* high, void (*function)()) {
    (void)low;
    auto** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(high) & ~uintptr_t(15));
    *--top = nullptr;  // where a return address would be: the function never returns
    *--top = reinterpret_cast<void*>(function);
    top -= 6;  // rbp, rbx, r12 .. r15
    memset(top, 0, 6 * sizeof(void*));
    stack_pointer = top;
  }
};

extern "C" void fagen_switch_stack(void** save, void* load);
asm(R"(
.text
.type fagen_switch_stack, @function
fagen_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size fagen_switch_stack, .-fagen_switch_stack
)");

inline void switch_context(Context& from, Context& to) {
  fagen_switch_stack(&from.stack_pointer, to.stack_pointer);
}

#else

struct Context {
  ucontext_t state;

  void start(char* low, char* high, void (*function)()) {
    getcontext(&state);
    state.uc_stack.ss_sp = low;
    state.uc_stack.ss_size = static_cast<size_t>(high - low);
    state.uc_link = nullptr;
    makecontext(&state, function, 0);
  }
};

inline void switch_context(Context& from, Context& to) {
  swapcontext(&from.state, &to.state);
}

#endif
