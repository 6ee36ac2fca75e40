// shadow.h: what a sanitizer is told of the fibers. Each has a Shadow, the sanitizer's own record of it.
#pragma once

#include <stddef.h>
#include <stdio.h>

#if defined(FAGEN_ADDRESS_SANITIZER)

extern "C" void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);

struct Shadow {
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;

  void create(const void* low, size_t bytes, const char*) { bottom = low, size = bytes; }
  void adopt() {}
};

inline void before_switch(Shadow& from, const Shadow& to, bool for_ever) {
  from.fake_stack = nullptr;
  __sanitizer_start_switch_fiber(for_ever ? nullptr : &from.fake_stack, to.bottom, to.size);
}

inline void after_switch(Shadow& now, Shadow* came_from) {
  __sanitizer_finish_switch_fiber(now.fake_stack, came_from ? &came_from->bottom : nullptr,
                                  came_from ? &came_from->size : nullptr);
}

#elif defined(FAGEN_THREAD_SANITIZER)

extern "C" void* __tsan_get_current_fiber();
extern "C" void* __tsan_create_fiber(unsigned flags);
extern "C" void __tsan_switch_to_fiber(void* fiber, unsigned flags);
extern "C" void __tsan_set_fiber_name(void* fiber, const char* name);
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
extern "C" void __tsan_ignore_thread_begin();
extern "C" void __tsan_ignore_thread_end();

constexpr unsigned NO_SYNCHRONISATION = 1;

struct Shadow {
  void* fiber = nullptr;

  void create(const void*, size_t, const char* name) {
    fiber = __tsan_create_fiber(0);
    __tsan_set_fiber_name(fiber, name);
  }
  void adopt() { fiber = __tsan_get_current_fiber(); }
};

inline void before_switch(Shadow&, const Shadow& to, bool) {
  __tsan_switch_to_fiber(to.fiber, NO_SYNCHRONISATION);
}

inline void after_switch(Shadow&, Shadow*) {}

#else

struct Shadow {
  void create(const void*, size_t, const char*) {}
  void adopt() {}
};

inline void before_switch(Shadow&, const Shadow&, bool) {}
inline void after_switch(Shadow&, Shadow*) {}

#endif

#if defined(FAGEN_THREAD_SANITIZER)

inline void release(void* moment) {
  __tsan_release(moment);
}
inline void acquire(void* moment) {
  __tsan_acquire(moment);
}

// What carries out the asynchronous operations of one thread: a fiber of its own to the sanitizer. An
// operation comes after all that its thread did before the issue, and before what the thread does after a
// wait for its group; nothing else orders it. Operations run in the order of their issue, or one would seem
// to come after the issue of the next.
class Engine {
 public:
  static constexpr bool IN_ORDER = true;

  void restart() { issued_ = begun_ = awaited_ = 0; }

  void issued() { __tsan_release(&issues_[issued_++ % MOST]); }

  void begin(unsigned thread, int line) {
    if (!fiber_) fiber_ = __tsan_create_fiber(0);
    char name[64];
    snprintf(name, sizeof name, "thread %u, copy of line %d", thread, line);
    __tsan_set_fiber_name(fiber_, name);
    home_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber_, NO_SYNCHRONISATION);
    __tsan_acquire(&issues_[begun_++ % MOST]);
  }

  void end(unsigned group) {
    __tsan_release(&groups_[group % MOST]);
    __tsan_switch_to_fiber(home_, NO_SYNCHRONISATION);
  }

  // The thread has waited for its groups below `group`.
  void awaited(unsigned group) {
    for (; awaited_ < group; ++awaited_) __tsan_acquire(&groups_[awaited_ % MOST]);
  }

 private:
  static constexpr unsigned MOST = 256;  // operations of a thread, or groups of them, in flight
  void* fiber_ = nullptr;
  void* home_ = nullptr;
  unsigned issued_ = 0, begun_ = 0, awaited_ = 0;
  unsigned long long issues_[MOST], groups_[MOST];
};

// While it lives, what this fiber reads and writes is the scheduler's business and no part of the kernel.
struct Unwatched {
  Unwatched() { __tsan_ignore_thread_begin(); }
  ~Unwatched() { __tsan_ignore_thread_end(); }
};

constexpr bool WATCHES_RACES = true;

#else

inline void release(void*) {}
inline void acquire(void*) {}

struct Engine {
  static constexpr bool IN_ORDER = false;
  void restart() {}
  void issued() {}
  void begin(unsigned, int) {}
  void end(unsigned) {}
  void awaited(unsigned) {}
};

struct Unwatched {
  Unwatched() {}
};

constexpr bool WATCHES_RACES = false;

#endif
