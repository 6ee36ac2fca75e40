// runtime.cpp: the scheduler of the emulator, compiled once.
//
// Every CUDA thread is a fiber that runs until it has to wait. A few blocks are live at once, as many as a
// small number of multiprocessors holds, and take turns. The schedule picks who goes on: the lowest warp and
// lane that can (forward), the highest (backward), or one by the seed's dice (random). Memory is what the
// kernel's own loads and stores make of it, so a missing barrier shows as soon as a schedule runs a reader
// before its writer.

#include <mutex>
#include <thread>

#include "scheduler.h"

__thread FagenThread* fagen_self = nullptr;

namespace emulator {

__thread Scheduler* scheduler = nullptr;

namespace {

std::mutex spare_lock;
std::vector<char*> spare_stacks;

}  // namespace

std::vector<char*> take_stacks(size_t count) {
  std::vector<char*> taken;
  {
    const std::lock_guard<std::mutex> guard(spare_lock);
    const size_t spare = std::min(count, spare_stacks.size());
    taken.assign(spare_stacks.end() - static_cast<long>(spare), spare_stacks.end());
    spare_stacks.resize(spare_stacks.size() - spare);
  }
  const size_t missing = count - taken.size();
  if (missing == 0) return taken;
  void* memory = mmap(nullptr, missing * STACK_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    give_back_stacks(taken);
    return {};
  }
  for (size_t i = 0; i < missing; ++i) {
    taken.push_back(static_cast<char*>(memory) + i * STACK_BYTES);
    mprotect(taken.back(), PAGE_BYTES, PROT_NONE);
  }
  return taken;
}

void give_back_stacks(const std::vector<char*>& stacks) {
  const std::lock_guard<std::mutex> guard(spare_lock);
  for (char* stack : stacks) {
    if (spare_stacks.size() < SPARE_STACKS) {
      spare_stacks.push_back(stack);
    } else {
      munmap(stack, STACK_BYTES);
    }
  }
}

void Scheduler::make_fibers() {
  const size_t count = static_cast<size_t>(capacity_) * block_threads_;
  stacks_ = take_stacks(count);
  if (stacks_.empty()) {
    launch_.fail("the emulator finds no memory for the stacks of " + std::to_string(count) + " threads");
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    auto fiber = std::make_unique<Fiber>();
    fiber->stack = stacks_[i];
    const std::string name = "thread " + std::to_string(i % block_threads_);
    fiber->shadow.create(fiber->stack + PAGE_BYTES, STACK_BYTES - PAGE_BYTES, name.c_str());
    idle_.push_back(fiber.get());
    fibers_.push_back(std::move(fiber));
  }
  std::reverse(idle_.begin(), idle_.end());
}

void Scheduler::admit_blocks() {
  while (live_.size() < capacity_ && next_block_ < launch_.blocks) {
    auto block = std::make_unique<Block>();
    const unsigned* grid = request_.grid;
    const unsigned* dim = request_.block;
    block->index = {static_cast<unsigned>(next_block_ % grid[0]),
                    static_cast<unsigned>(next_block_ / grid[0] % grid[1]),
                    static_cast<unsigned>(next_block_ / grid[0] / grid[1])};
    next_block_ += request_.workers;
    if (request_.shared_bytes) {
      void* shared = nullptr;
      if (posix_memalign(&shared, 1024, request_.shared_bytes) == 0)
        memset(shared, 0xff, request_.shared_bytes);
      block->shared = static_cast<unsigned char*>(shared);
    }
    block->warps.resize((block_threads_ + 31) / 32);
    if (request_.schedule == static_cast<int>(Schedule::random) && random_.below(2))
      block->slow_warps = some_warps();
    for (unsigned i = 0; i < block_threads_; ++i) {
      Fiber& fiber = *idle_.back();
      idle_.pop_back();
      fiber.thread = {i % dim[0], i / dim[0] % dim[1], i / dim[0] / dim[1]};
      fiber.block = block->index;
      fiber.block_dim = {dim[0], dim[1], dim[2]};
      fiber.grid_dim = {grid[0], grid[1], grid[2]};
      fiber.shared = block->shared;
      fiber.shared_bytes = request_.shared_bytes;
      fiber.lane = i % 32;
      fiber.number = i;
      fiber.owner = block.get();
      fiber.groups_committed = 0;
      fiber.units = {};
      fiber.engine.restart();
      // Stacks start at different lines of the cache, or all fibers would compete for the same few.
      char* top = fiber.stack + STACK_BYTES - (i * 320) % 3840 / 64 * 64;
      fiber.context.start(fiber.stack + PAGE_BYTES, top, first_steps);
      block->fibers.push_back(&fiber);
      make_ready(fiber);
    }
    start_units(*block);
    live_.push_back(std::move(block));
  }
}

// A quarter of all warps, or half of all warpgroups.
unsigned Scheduler::some_warps() {
  if (random_.below(2)) return random_.next() & random_.next();
  unsigned warps = 0;
  for (unsigned group = 0; group < 8; ++group) warps |= random_.below(2) ? 0xfu << 4 * group : 0;
  return warps;
}

void Scheduler::retire(Block& block) {
  retire_units(block);
  idle_.insert(idle_.end(), block.fibers.rbegin(), block.fibers.rend());
  free(block.shared);
  for (size_t i = 0; i < live_.size(); ++i) {
    if (live_[i].get() == &block) {
      live_.erase(live_.begin() + static_cast<long>(i));
      break;
    }
  }
  admit_blocks();
}

void Scheduler::make_ready(Fiber& fiber) {
  fiber.state = State::ready;
  fiber.owner->warps[fiber.number / 32].ready |= 1u << fiber.lane;
  fiber.owner->ready_warps |= 1u << fiber.number / 32;
}

// Where others might get ahead of a thread, they sometimes do.
void Scheduler::perhaps_yield(Fiber& fiber) {
  if (request_.schedule != static_cast<int>(Schedule::random) || random_.below(4)) return;
  make_ready(fiber);
  suspend(fiber, State::ready);
}

void Scheduler::first_steps() {
  Fiber& fiber = *static_cast<Fiber*>(fagen_self);
  after_switch(fiber.shadow, &scheduler->home_shadow_);
  scheduler->request_.enter(scheduler->request_.params);
  scheduler->leave(fiber);
}

void Scheduler::resume(Fiber& fiber) {
  fagen_self = &fiber;
  before_switch(home_shadow_, fiber.shadow, false);
  switch_context(home_, fiber.context);
  after_switch(home_shadow_, nullptr);
  fagen_self = nullptr;
}

void Scheduler::suspend(Fiber& fiber, State state) {
  fiber.state = state;
  before_switch(fiber.shadow, home_shadow_, state == State::gone);
  switch_context(fiber.context, home_);
  after_switch(fiber.shadow, &home_shadow_);
}

void Scheduler::finding(Fiber& fiber, int line, const std::string& text) {
  launch_.fail("line " + std::to_string(line) + ": thread " + position(fiber.thread) + " of block " +
               position(fiber.block) + ": " + text);
  stopped_ = true;
  suspend(fiber, State::gone);
  abort();  // a stopped launch resumes nobody
}

void Scheduler::leave(Fiber& fiber) {
  Block& block = *fiber.owner;
  Warp& warp = block.warps[fiber.number / 32];
  for (unsigned waiting = warp.meeting; waiting; waiting &= waiting - 1) {
    const Fiber& other = *block.fibers[fiber.number / 32 * 32 + lowest(waiting)];
    if (other.meeting_mask >> fiber.lane & 1) {
      finding(
          fiber, other.line,
          "has left the kernel, and lane " + std::to_string(other.lane) + " waits for it at " + other.what);
    }
  }
  if (block.arrived) {
    finding(fiber, block.barrier_line,
            "has left the kernel, and " + std::to_string(block.arrived) +
                " threads of its block wait for it at __syncthreads");
  }
  while (!fiber.flying.empty()) complete(fiber, 0);
  leave_units(fiber);
  warp.gone |= 1u << fiber.lane;
  block.gone += 1;
  progress_ = true;
  release(&end_);
  suspend(fiber, State::gone);
  abort();
}

void Scheduler::barrier(Fiber& fiber, int line) {
  Block& block = *fiber.owner;
  if (block.gone) {
    finding(fiber, line,
            "waits at __syncthreads, and " + std::to_string(block.gone) +
                " threads of its block have left the kernel");
  }
  if (block.arrived && block.barrier_line != line) {
    finding(fiber, line,
            "waits at __syncthreads, and " + std::to_string(block.arrived) +
                " threads of its block wait at the one of line " + std::to_string(block.barrier_line));
  }
  block.barrier_line = fiber.line = line;
  fiber.what = "__syncthreads";
  block.arrived += 1;
  progress_ = true;
  void* moment = block.moments.now();
  release(moment);
  if (block.arrived == block.fibers.size()) {
    block.arrived = 0;
    block.moments.passed += 1;
    for (Fiber* each : block.fibers) make_ready(*each);
    block_cursor_ += request_.schedule == static_cast<int>(Schedule::backward) ? live_.size() - 1 : 1;
    suspend(fiber, State::ready);
  } else {
    suspend(fiber, State::at_barrier);
  }
  acquire(moment);
}

void Scheduler::meet(Fiber& fiber, const char* what, unsigned mask, int line, void* argument,
                     void (*resolve)(void* const*, unsigned), bool orders_memory) {
  Block& block = *fiber.owner;
  const unsigned warp_number = fiber.number / 32;
  Warp& warp = block.warps[warp_number];
  Fiber* const* lanes = &block.fibers[warp_number * 32];
  const unsigned exist = warp_number * 32 + 32 <= block_threads_ ? ~0u : (1u << block_threads_ % 32) - 1;
  if (!(mask >> fiber.lane & 1))
    finding(fiber, line, std::string(what) + " with a mask that lacks its own lane");
  if (mask & (warp.gone | ~exist)) {
    finding(fiber, line,
            std::string(what) + " waits for lane " + std::to_string(lowest(mask & (warp.gone | ~exist))) +
                ", which has left the kernel or never was");
  }
  fiber.what = what;
  fiber.line = line;
  fiber.meeting_mask = mask;
  warp.arguments[fiber.lane] = argument;
  warp.meeting |= 1u << fiber.lane;
  progress_ = true;
  const bool complete = (warp.meeting & mask) == mask;
  unsigned others = warp.meeting & mask & ~(1u << fiber.lane);
  if (!complete && others) others = 1u << lowest(others);  // the last to come looks at all
  for (; others; others &= others - 1) {
    const Fiber& other = *lanes[lowest(others)];
    if (other.line != line || other.meeting_mask != mask || strcmp(other.what, what) != 0) {
      char text[160];
      snprintf(text, sizeof text, "%s with mask %08x, and lane %u is at %s of line %d with mask %08x", what,
               mask, other.lane, other.what, other.line, other.meeting_mask);
      finding(fiber, line, text);
    }
  }
  Moments& moments = warp.moments[lowest(mask)];
  void* moment = moments.now();
  if (orders_memory) release(moment);
  if (complete) {
    resolve(warp.arguments, mask);
    warp.meeting &= ~mask;
    if (orders_memory) moments.passed += 1;
    for (unsigned each = mask; each; each &= each - 1) make_ready(*lanes[lowest(each)]);
  }
  suspend(fiber, complete ? State::ready : State::in_warp);
  if (orders_memory) acquire(moment);
}

void Scheduler::poll(Fiber& fiber, const char* what, int line) {
  Warp& warp = fiber.owner->warps[fiber.number / 32];
  fiber.what = what;
  fiber.line = line;
  warp.polling |= 1u << fiber.lane;
  suspend(fiber, State::polling);
}

void Scheduler::issue(Fiber& fiber, void (*run)(void*), const void* data, unsigned bytes, int line) {
  Operation operation{run, fiber.groups_committed, line, {}};
  if (bytes > sizeof operation.data) finding(fiber, line, "an operation with too many operands");
  memcpy(operation.data, data, bytes);
  if (fiber.flying.empty()) {
    fiber.place_among_busy = busy_.size();
    busy_.push_back(&fiber);
  }
  fiber.flying.push_back(operation);
  fiber.engine.issued();
  if (moments_ == Moment::at_issue) complete(fiber, fiber.flying.size() - 1);
}

void Scheduler::complete(Fiber& fiber, size_t index) {
  const Operation& operation = fiber.running = fiber.flying[index];
  fiber.flying.erase(fiber.flying.begin() + static_cast<long>(index));
  if (fiber.flying.empty()) {
    busy_[fiber.place_among_busy] = busy_.back();
    busy_[fiber.place_among_busy]->place_among_busy = fiber.place_among_busy;
    busy_.pop_back();
  }
  fiber.engine.begin(fiber.number, operation.line);
  operation.run(fiber.running.data);
  fiber.engine.end(operation.group);
  progress_ = true;
}

void Scheduler::complete_any(bool forced) {
  if (!flights_.empty() && (busy_.empty() || random_.below(2) == 0)) return land_any(forced);
  Fiber& fiber = *busy_[random_.below(static_cast<unsigned>(busy_.size()))];
  complete(fiber, Engine::IN_ORDER ? 0 : random_.below(static_cast<unsigned>(fiber.flying.size())));
}

void Scheduler::wait_groups(Fiber& fiber, unsigned groups) {
  for (size_t i = 0; i < fiber.flying.size();) {
    if (fiber.flying[i].group + groups < fiber.groups_committed) {
      complete(fiber, i);
    } else {
      ++i;
    }
  }
  if (fiber.groups_committed > groups) fiber.engine.awaited(fiber.groups_committed - groups);
}

unsigned Scheduler::choose(unsigned mask) {
  switch (static_cast<Schedule>(request_.schedule)) {
    case Schedule::forward:
      return lowest(mask);
    case Schedule::backward:
      return highest(mask);
    case Schedule::random:
      break;
  }
  const unsigned turn = random_.next() & 31;
  const unsigned turned = mask >> turn | mask << (-turn & 31);
  return (lowest(turned) + turn) & 31;
}

Fiber* Scheduler::pick() {
  if (request_.schedule == static_cast<int>(Schedule::random)) {
    const unsigned dice = random_.next();
    if (dice % 4 == 0) block_cursor_ = dice >> 8;
    if (dice % 4 == 0 || dice % 4 == 1) warp_cursor_ = ~0u;
    if (dice / 16 % 16 == 0 && progress_) {  // who spins finds nothing new else
      progress_ = false;
      wake_pollers();
    }
  }
  if (moments_ == Moment::between && in_flight() && random_.below(4) == 0) complete_any(false);
  for (size_t tries = 0; tries < live_.size(); ++tries, ++block_cursor_) {
    block_cursor_ %= live_.size();
    Block& block = *live_[block_cursor_];
    if (!block.ready_warps) continue;
    if (warp_cursor_ >= block.warps.size() || !block.warps[warp_cursor_].ready ||
        request_.schedule != static_cast<int>(Schedule::random)) {
      const unsigned quick = block.ready_warps & ~block.slow_warps & ~block.held_warps;
      if (!quick) block.held_warps = 0;
      warp_cursor_ = choose(quick && random_.below(64) ? quick : block.ready_warps);
    }
    Warp& warp = block.warps[warp_cursor_];
    const unsigned lane = choose(warp.ready);
    warp.ready &= ~(1u << lane);
    if (!warp.ready) block.ready_warps &= ~(1u << warp_cursor_);
    return block.fibers[warp_cursor_ * 32 + lane];
  }
  return nullptr;
}

// Those who spin look again, but for whom nothing has changed.
bool Scheduler::wake_pollers() {
  bool any = false;
  for (auto& block : live_) {
    for (size_t w = 0; w < block->warps.size(); ++w) {
      Warp& warp = block->warps[w];
      for (unsigned lanes = warp.polling; lanes; lanes &= lanes - 1) {
        Fiber& fiber = *block->fibers[w * 32 + lowest(lanes)];
        if (still_waits(fiber)) continue;
        warp.polling &= ~(1u << fiber.lane);
        make_ready(fiber);
        any = true;
      }
    }
  }
  return any;
}

// Where pollers have looked in vain: whether blocks of another worker may yet do what they wait for. All have stopped
// for good when each has looked since the last one stopped.
bool Scheduler::others_may_help() {
  if (!looks_since_) {
    looks_since_ = ++launch_.stops;
    return true;
  }
  launch_.stuck[worker_] = looks_since_;
  if (launch_.all_stuck()) return false;
  sched_yield();
  looks_since_ = launch_.stops;
  return true;
}

std::string Scheduler::who_waits(const Block& block) const {
  std::string text;
  for (size_t i = 0; i < block.fibers.size();) {
    const Fiber& fiber = *block.fibers[i];
    size_t end = i + 1;
    while (end < block.fibers.size() && block.fibers[end]->state == fiber.state &&
           block.fibers[end]->line == fiber.line) {
      ++end;
    }
    const bool many = end - i > 1;
    text += "\n  block " + position(block.index) + (many ? " threads " : " thread ") + std::to_string(i);
    if (many) text += " to " + std::to_string(end - 1);
    if (fiber.state == State::gone) {
      text += many ? " have left the kernel" : " has left the kernel";
    } else {
      const bool spins = fiber.state == State::polling;
      text += std::string(spins ? " spin" : " wait") + (many ? "" : "s") + (spins ? " in " : " at ");
      text += std::string(fiber.what) + ", line " + std::to_string(fiber.line);
    }
    i = end;
  }
  return text;
}

void Scheduler::report_deadlock() {
  std::string text = "deadlock: no thread can go on";
  for (const auto& block : live_) text += who_waits(*block);
  launch_.fail(text);
  stopped_ = true;
}

void Scheduler::run() {
  scheduler = this;
  home_shadow_.adopt();
  make_fibers();
  Unwatched unwatched;
  if (!launch_.failed) admit_blocks();
  progress_ = true;
  while (!live_.empty() && !stopped_ && !launch_.failed) {
    Fiber* fiber = pick();
    if (fiber) {
      resume(*fiber);
      if (fiber->state == State::gone && fiber->owner->gone == fiber->owner->fibers.size())
        retire(*fiber->owner);
      continue;
    }
    // Nobody is ready. Whoever spins looks again; if that has changed nothing, an operation takes effect.
    if (!progress_) {
      if (in_flight()) {
        complete_any(true);
      } else if (!others_may_help()) {
        report_deadlock();
        break;
      }
    } else {
      looks_since_ = launch_.stuck[worker_] = 0;
    }
    progress_ = false;
    if (!wake_pollers() && !in_flight()) report_deadlock();
  }
  launch_.stuck[worker_] = ~0ull;
  ++launch_.stops;
  acquire(&end_);
  scheduler = nullptr;
}

}  // namespace emulator

using namespace emulator;

#if defined(FAGEN_ADDRESS_SANITIZER)
// The sanitizer calls this before it reports.
extern "C" void __asan_on_error() {
  if (!fagen_self) return;
  fprintf(stderr, "fagen: thread %s of block %s\n", position(fagen_self->thread).c_str(),
          position(fagen_self->block).c_str());
}
#endif

#define SELF (*static_cast<Fiber*>(fagen_self))

extern "C" {

void fagen_block_barrier(int line) {
  Unwatched unwatched;
  scheduler->barrier(SELF, line);
}

void fagen_warp_meet(const char* what, unsigned mask, int line, void* argument,
                     void (*resolve)(void* const* arguments, unsigned mask), bool orders_memory) {
  Unwatched unwatched;
  scheduler->meet(SELF, what, mask, line, argument, resolve, orders_memory);
}

void fagen_poll(const char* what, int line) {
  Unwatched unwatched;
  scheduler->poll(SELF, what, line);
}

void fagen_polled() {
  scheduler->polled();
}

void fagen_issue(void (*run)(void* data), const void* data, unsigned bytes, int line) {
  Unwatched unwatched;
  scheduler->issue(SELF, run, data, bytes, line);
}

void fagen_commit_group() {
  SELF.groups_committed += 1;
}

void fagen_wait_groups(unsigned groups) {
  Unwatched unwatched;
  scheduler->wait_groups(SELF, groups);
}

void fagen_finding(int line, const char* format, ...) {
  Unwatched unwatched;
  char text[512];
  va_list rest;
  va_start(rest, format);
  vsnprintf(text, sizeof text, format, rest);
  va_end(rest);
  scheduler->finding(SELF, line, text);
}

int fagen_launch(const FagenLaunch* request) {
  Launch launch(*request);
  if (launch.blocks == 0) return 0;
  const auto work = [&launch](unsigned worker) { Scheduler(launch, worker).run(); };
  std::vector<std::thread> helpers;
  for (unsigned worker = 1; worker < request->workers; ++worker) helpers.emplace_back(work, worker);
  work(0);
  for (auto& helper : helpers) helper.join();
  return launch.failed ? 1 : 0;
}
}
