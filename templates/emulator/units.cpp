// units.cpp: barriers in shared memory, named barriers, copies of tiles and products of warpgroups, compiled once.
//
// A copy or a product takes effect at a moment the schedule picks; until then the memory or the registers it
// writes are no numbers. What no schedule would show is checked at issue: bytes still read, not fenced, over-arrival.

#include "scheduler.h"

namespace emulator {

namespace {

constexpr unsigned MARK[2] = {0xfa6eba44u, 0x1e42c0deu};  // what stands in memory where a barrier is
constexpr unsigned REGISTERS = 65536, MOST_REGISTERS = 256;

std::string text_of(const char* format, ...) {
  char text[400];
  va_list rest;
  va_start(rest, format);
  vsnprintf(text, sizeof text, format, rest);
  va_end(rest);
  return text;
}

}  // namespace

void Scheduler::start_units(Block& block) {
  BlockUnits& units = block.units;
  const unsigned warps = static_cast<unsigned>(block.warps.size());
  units.warp_registers.assign(warps, std::min(MOST_REGISTERS, REGISTERS / block_threads_ / 8 * 8));
  units.warpgroups.resize((warps + 3) / 4);
  units.writers.resize(request_.shared_bytes / 16 + 1);
  units.elected = choose(~0u);
}

// What goes wrong while no thread runs, or another one does.
void Scheduler::report(const Fiber& fiber, int line, const std::string& text) {
  launch_.fail("line " + std::to_string(line) + ": thread " + position(fiber.thread) + " of block " +
               position(fiber.block) + ": " + text);
  stopped_ = true;
}

// ------------------------------------------------------------------------------- barriers in shared memory

Barrier& Scheduler::barrier_at(Fiber& fiber, unsigned address, const char* what, int line) {
  const auto found = fiber.owner->units.barriers.find(address);
  if (found == fiber.owner->units.barriers.end())
    finding(fiber, line, text_of("%s a barrier at byte %u, where none was made", what, address));
  if (memcmp(fiber.shared + address, MARK, sizeof MARK) != 0)
    finding(fiber, line,
            text_of("%s the barrier at byte %u, which something was written over", what, address));
  if (found->second.maker != &fiber && !found->second.published)
    finding(fiber, line, text_of("%s the barrier at byte %u before publish_barriers()", what, address));
  return found->second;
}

void Scheduler::init_barrier(Fiber& fiber, unsigned address, unsigned arrivals, int line) {
  if (address % 8 != 0 || address + 8 > fiber.shared_bytes)
    finding(fiber, line, text_of("a barrier at byte %u of %u", address, fiber.shared_bytes));
  if (arrivals == 0 || arrivals >= 1u << 20)
    finding(fiber, line, text_of("a barrier of %u arrivals", arrivals));
  Barrier& barrier = fiber.owner->units.barriers[address];
  if (barrier.maker) finding(fiber, line, text_of("a second barrier at byte %u", address));
  barrier.arrivals = barrier.pending = arrivals;
  barrier.maker = &fiber;
  barrier.seen.assign(block_threads_, -1);
  memcpy(fiber.shared + address, MARK, sizeof MARK);
}

void Scheduler::publish_barriers(Fiber& fiber) {
  for (auto& each : fiber.owner->units.barriers) each.second.published |= each.second.maker == &fiber;
}

void Scheduler::arrive(Fiber& fiber, unsigned address, unsigned bytes, int line) {
  Barrier& barrier = barrier_at(fiber, address, "arrives at", line);
  if (barrier.pending == 0) {
    finding(fiber, line,
            text_of("arrives at the barrier at byte %u, at which all %u of this phase have arrived", address,
                    barrier.arrivals));
  }
  barrier.pending -= 1;
  barrier.bytes += bytes;
  progress_ = true;
  release(&barrier.moment);
  if (barrier.pending == 0 && barrier.bytes == 0) {
    end_phase(*fiber.owner, address, barrier);
    if (hands_over_) return hand_over(fiber, address);
  }
  perhaps_yield(fiber);
}

// Those who have waited for a barrier go on, and the warpgroup that let them does not: what it still reads of a
// buffer it has freed may be written over, what it has not written of one it has filled is read.
void Scheduler::hand_over(Fiber& fiber, unsigned address) {
  Block& block = *fiber.owner;
  for (Fiber* other : block.fibers) {
    if (other->state == State::polling && other->units.waits_for == static_cast<int>(address)) {
      block.warps[other->number / 32].polling &= ~(1u << other->lane);
      make_ready(*other);
    }
  }
  block.held_warps |= 0xfu << fiber.number / 128 * 4;
  warp_cursor_ = ~0u;
  make_ready(fiber);
  suspend(fiber, State::ready);
}

void Scheduler::complete_bytes(Block& block, unsigned address, unsigned bytes) {
  Barrier& barrier = block.units.barriers.at(address);
  barrier.bytes -= bytes;
  if (barrier.pending == 0 && barrier.bytes == 0) end_phase(block, address, barrier);
}

void Scheduler::end_phase(Block& block, unsigned address, Barrier& barrier) {
  for (const Fiber* fiber : block.fibers) {
    if (fiber->units.waits_for != static_cast<int>(address) || fiber->units.parity == barrier.phases % 2u)
      continue;
    report(*fiber, fiber->line,
           text_of("the phase of the barrier at byte %u for which it waits has ended, and the "
                   "next one too, before it looked",
                   address));
  }
  barrier.phases += 1;
  barrier.pending = barrier.arrivals;
}

void Scheduler::wait_phase(Fiber& fiber, unsigned address, unsigned parity, int line) {
  Barrier& barrier = barrier_at(fiber, address, "waits at", line);
  if (parity > 1) finding(fiber, line, text_of("waits for parity %u", parity));
  fiber.units.waits_for = static_cast<int>(address);
  fiber.units.barrier = &barrier;
  fiber.units.parity = parity;
  while (barrier.phases % 2u == parity) poll(fiber, "a barrier in shared memory", line);
  fiber.units.waits_for = -1;
  progress_ = true;
  int& seen = barrier.seen[fiber.number];
  if (barrier.phases - 1 > seen + 1) {
    finding(fiber, line,
            text_of("takes the end of phase %d of the barrier at byte %u for that of phase %d, for "
                    "which it has not waited",
                    barrier.phases - 1, address, seen + 1));
  }
  seen = barrier.phases - 1;
  acquire(&barrier.moment);
}

// Whether a thread that spins would find what it found before.
bool Scheduler::still_waits(const Fiber& fiber) const {
  const FiberUnits& units = fiber.units;
  if (units.waits_for >= 0) return units.barrier->phases % 2u == units.parity;
  if (fiber.owner->units.warpgroups[fiber.number / 128].done >= units.waits_for_products) return false;
  const size_t index = product_of(fiber);
  return index == flights_.size() || is_late(*flights_[index]);
}

// --------------------------------------------------------------------------- named barriers and registers

void Scheduler::group_barrier(Fiber& fiber, int number, unsigned threads, bool waits, int line) {
  Block& block = *fiber.owner;
  const char* what = waits ? "group_sync" : "group_arrive";
  if (number < 1 || number > 15)
    finding(fiber, line, text_of("%s at barrier %d; there are 1 to 15", what, number));
  if (threads == 0 || threads % 32 != 0 || threads > block_threads_)
    finding(fiber, line, text_of("%s of %u threads in a block of %u", what, threads, block_threads_));
  GroupBarrier& barrier = block.units.groups[number];
  if (barrier.came.empty()) {
    barrier.threads = threads;
    barrier.line = line;
  } else if (barrier.threads != threads) {
    finding(fiber, line,
            text_of("%s of %u threads at barrier %d, where line %d waits for %u", what, threads, number,
                    barrier.line, barrier.threads));
  }
  if (std::find(barrier.came.begin(), barrier.came.end(), fiber.number) != barrier.came.end())
    finding(fiber, line,
            text_of("arrives twice at barrier %d before all %u threads have come", number, threads));
  barrier.came.push_back(fiber.number);
  progress_ = true;
  void* moment = barrier.moments.now();
  release(moment);
  if (waits) {
    fiber.what = what;
    fiber.line = line;
  }
  if (barrier.came.size() == threads) {
    barrier.came.clear();
    barrier.moments.passed += 1;
    for (Fiber* each : barrier.waiting) make_ready(*each);
    barrier.waiting.clear();
    if (waits) {
      make_ready(fiber);
      suspend(fiber, State::ready);
    }
  } else if (waits) {
    barrier.waiting.push_back(&fiber);
    suspend(fiber, State::at_barrier);
  }
  if (waits) {
    acquire(moment);
  } else {
    perhaps_yield(fiber);
  }
}

bool Scheduler::set_registers(Fiber& fiber, unsigned count, bool grows, int line) {
  BlockUnits& units = fiber.owner->units;
  unsigned& now = units.warp_registers[fiber.number / 32];
  if (now == count) return true;
  if (grows != (count > now))
    finding(fiber, line, text_of("%s to %u registers from %u", grows ? "grows" : "shrinks", count, now));
  if (grows && units.free_registers < (count - now) * 32) return false;
  units.free_registers += (now - count) * 32;  // modulo 2^32
  now = count;
  progress_ = true;
  return true;
}

// ---------------------------------------------------------------------------------------------- in flight

// What is in flight and touches some bytes, or nothing.
const Flight* Scheduler::touching(const Block& block, unsigned begin, unsigned end, bool only_writes) const {
  for (const auto& flight : flights_) {
    if (flight->block != &block || (only_writes && flight->unit != Flight::Unit::load)) continue;
    for (const auto& range : flight->ranges) {
      if (range[0] < end && begin < range[1]) return flight.get();
    }
  }
  return nullptr;
}

void Scheduler::fly(std::unique_ptr<Flight> flight) {
  flights_.push_back(std::move(flight));
  if (moments_ == Moment::at_issue) land(flights_.size() - 1);
}

void Scheduler::land(size_t index) {
  const auto flight = std::move(flights_[index]);
  flights_.erase(flights_.begin() + static_cast<long>(index));
  flight->run();
  progress_ = true;
}

// What is waited for happens now or, of a late unit, where nothing else can go on.
void Scheduler::land_or_poll(Fiber& fiber, size_t index, const char* what, int line) {
  if (is_late(*flights_[index])) {
    poll(fiber, what, line);
  } else {
    land(index);
  }
}

void Scheduler::land_any(bool forced) {
  const size_t count = flights_.size();
  size_t start = random_.below(static_cast<unsigned>(count));
  for (size_t tries = 0; tries < count && is_late(*flights_[start]); ++tries) start = (start + 1) % count;
  if (!forced && is_late(*flights_[start])) return;
  size_t index = start;
  if (flights_[start]->unit == Flight::Unit::product) {
    for (index = 0; index < start; ++index) {
      const Flight& earlier = *flights_[index];
      if (earlier.unit == Flight::Unit::product && earlier.block == flights_[start]->block &&
          earlier.warpgroup == flights_[start]->warpgroup) {
        break;
      }
    }
  }
  land(index);
}

void Scheduler::leave_units(Fiber& fiber) {
  if (!fiber.units.hidden.empty()) finding(fiber, fiber.line, "has left the kernel with a product in flight");
  for (size_t i = 0; i < flights_.size();) {
    const Flight& flight = *flights_[i];
    if (flight.thread != &fiber || flight.unit == Flight::Unit::load) {
      ++i;
    } else if (flight.unit == Flight::Unit::store_read) {
      finding(fiber, flight.line, "has left the kernel, and its store may still read shared memory");
    } else {
      land(i);
    }
  }
}

void Scheduler::retire_units(Block& block) {
  for (size_t i = 0; i < flights_.size();) {
    if (flights_[i]->block != &block) {
      ++i;
      continue;
    }
    report(*flights_[i]->thread, flights_[i]->line, "the block has ended with this copy in flight");
    flights_.erase(flights_.begin() + static_cast<long>(i));
  }
}

// --------------------------------------------------------------------------------------- copies of tiles

void Scheduler::note_write(Fiber& fiber, unsigned address, unsigned bytes, int line) {
  BlockUnits& units = fiber.owner->units;
  if (const Flight* flight = touching(*fiber.owner, address, address + bytes, false)) {
    finding(fiber, line,
            text_of("writes to bytes %u to %u, which what line %d issued still uses", address,
                    address + bytes - 1, flight->line));
  }
  units.written = true;
  for (unsigned chunk = address / 16; chunk <= (address + bytes - 1) / 16; ++chunk) {
    units.writers[chunk] = {static_cast<unsigned short>(fiber.number + 1), static_cast<unsigned short>(line),
                            fiber.units.async_fences};
  }
}

void Scheduler::check_fenced(Fiber& fiber, unsigned begin, unsigned end, int line) {
  if (!fiber.owner->units.written) return;
  for (unsigned chunk = begin / 16; chunk * 16 < end; ++chunk) {
    const Writer& writer = fiber.owner->units.writers[chunk];
    if (!writer.thread_plus_1) continue;
    const Fiber& who = *fiber.owner->fibers[writer.thread_plus_1 - 1u];
    if (who.units.async_fences == writer.fences) {
      finding(fiber, line,
              text_of("reads byte %u, which thread %u wrote in line %u without fence_async() since",
                      chunk * 16, writer.thread_plus_1 - 1u, unsigned(writer.line)));
    }
  }
}

void Scheduler::issue_load(Fiber& fiber, const FagenTransfer& transfer, int line) {
  Block& block = *fiber.owner;
  const unsigned begin = transfer.address, end = begin + transfer.bytes;
  barrier_at(fiber, transfer.barrier, "has a copy report at", line);
  const Flight* other = touching(block, begin, end, false);
  int reader = other ? other->line : 0;
  for (const Warpgroup& warpgroup : block.units.warpgroups) {
    for (const auto& joint : warpgroup.forming) {
      const FagenGroupProduct& product = joint->product;
      if ((product.left_begin < end && begin < product.left_end) ||
          (product.right_begin < end && begin < product.right_end)) {
        reader = joint->line;
      }
    }
  }
  if (reader) {
    finding(fiber, line,
            text_of("a copy overwrites bytes %u to %u, which what line %d issued still uses", begin, end - 1,
                    reader));
  }
  memset(fiber.shared + begin, 0xff, transfer.bytes);
  for (unsigned chunk = begin / 16; chunk * 16 < end; ++chunk) block.units.writers[chunk] = {};
  auto flight = std::make_unique<Flight>();
  *flight = {
      Flight::Unit::load, &block, &fiber, 0, 0, {{begin, end}, {0, 0}}, line, [this, &block, transfer] {
        transfer.load(transfer);
        complete_bytes(block, transfer.barrier, transfer.bytes);
      }};
  fly(std::move(flight));
  perhaps_yield(fiber);
}

void Scheduler::issue_store(Fiber& fiber, const FagenTransfer& transfer, int line) {
  const unsigned begin = transfer.address, end = begin + transfer.bytes;
  check_fenced(fiber, begin, end, line);
  if (const Flight* flight = touching(*fiber.owner, begin, end, true))
    finding(fiber, line, text_of("a store reads what the copy of line %d has not brought yet", flight->line));
  const unsigned group = fiber.units.stores_committed;
  Fiber* thread = &fiber;
  auto flight = std::make_unique<Flight>();
  *flight = {Flight::Unit::store_read, fiber.owner, thread, group, 0, {{begin, end}, {0, 0}}, line, [=] {
               auto taken = std::make_shared<std::vector<unsigned char>>(transfer.bytes);
               transfer.read(transfer, taken->data());
               auto second = std::make_unique<Flight>();
               *second = {Flight::Unit::store_write,
                          thread->owner,
                          thread,
                          group,
                          0,
                          {{0, 0}, {0, 0}},
                          line,
                          [transfer, taken] { transfer.write(transfer, taken->data()); }};
               fly(std::move(second));
             }};
  fly(std::move(flight));
}

void Scheduler::wait_stores(Fiber& fiber, unsigned groups, bool only_reads, int line) {
  for (size_t i = 0; i < flights_.size();) {
    const Flight& flight = *flights_[i];
    const bool waited =
        flight.unit == Flight::Unit::store_read || (flight.unit == Flight::Unit::store_write && !only_reads);
    if (flight.thread != &fiber || !waited || flight.group + groups >= fiber.units.stores_committed) {
      ++i;
    } else {
      land_or_poll(fiber, i, only_reads ? "store_wait_read" : "store_wait", line);
      i = 0;
    }
  }
}

// --------------------------------------------------------------------------------------------- products

void Scheduler::issue_product(Fiber& fiber, const FagenGroupProduct& product, int line) {
  Block& block = *fiber.owner;
  Warpgroup& warpgroup = block.units.warpgroups[fiber.number / 128];
  const unsigned thread = fiber.number % 128;
  if (!fiber.units.fenced) finding(fiber, line, "a product in a group without wgmma_fence()");
  if (fiber.number / 128 * 128 + 128 > block_threads_)
    finding(fiber, line, "a product of less than a warpgroup");
  const unsigned long long index = fiber.units.products++;
  if (index < warpgroup.formed) finding(fiber, line, "a product its warpgroup has finished without it");
  if (index - warpgroup.formed == warpgroup.forming.size()) {
    for (const auto& range : {std::pair(product.left_begin, product.left_end),
                              std::pair(product.right_begin, product.right_end)}) {
      if (range.first == range.second) continue;
      if (range.second > fiber.shared_bytes)
        finding(fiber, line, text_of("a product reads to byte %u of %u", range.second, fiber.shared_bytes));
      check_fenced(fiber, range.first, range.second, line);
      if (const Flight* flight = touching(block, range.first, range.second, true))
        finding(fiber, line,
                text_of("a product reads what the copy of line %d has not brought yet", flight->line));
    }
    warpgroup.forming.push_back(std::make_shared<Joint>());
    warpgroup.forming.back()->product = product;
    warpgroup.forming.back()->line = line;
  }
  const auto joint = warpgroup.forming[index - warpgroup.formed];
  const FagenGroupProduct& first = joint->product;
  if (joint->line != line || first.run != product.run || first.left != product.left ||
      first.right != product.right || first.add != product.add) {
    finding(fiber, line,
            text_of("issues a product other than that of line %d, which another thread of its warpgroup "
                    "issued",
                    joint->line));
  }
  Hidden* hidden = nullptr;
  for (const auto& each : fiber.units.hidden) {
    if (each->visible == product.sums) hidden = each.get();
  }
  if (!hidden) {
    fiber.units.hidden.push_back(std::make_unique<Hidden>());
    hidden = fiber.units.hidden.back().get();
    hidden->visible = product.sums;
    hidden->count = product.sums_count;
    hidden->values.reset(new float[product.sums_count]);
    memcpy(hidden->values.get(), product.sums, product.sums_count * sizeof(float));
    memset(product.sums, 0xff, product.sums_count * sizeof(float));
  }
  hidden->flying += 1;
  joint->sums[thread] = hidden->values.get();
  joint->left[thread] = product.left_words;
  if (product.left_words) memcpy(joint->left_words[thread].data(), product.left_words, 16);
  joint->joined += 1;
  progress_ = true;
  if (joint->joined < 128) return;
  warpgroup.forming.pop_front();
  warpgroup.formed += 1;
  auto flight = std::make_unique<Flight>();
  *flight = {Flight::Unit::product,
             &block,
             &fiber,
             0,
             fiber.number / 128,
             {{first.left_begin, first.left_end}, {first.right_begin, first.right_end}},
             line,
             [this, &block, joint, number = fiber.number / 128] { run_product(block, *joint, number); }};
  fly(std::move(flight));
}

void Scheduler::run_product(Block& block, Joint& joint, unsigned number) {
  joint.product.run(joint.product, joint.sums, joint.left);
  block.units.warpgroups[number].done += 1;
  for (unsigned thread = 0; thread < 128; ++thread) {
    Fiber& fiber = *block.fibers[number * 128 + thread];
    if (joint.left[thread] && memcmp(joint.left[thread], joint.left_words[thread].data(), 16) != 0)
      report(fiber, joint.line,
             "registers of a factor were written before the product that reads them was waited for");
    auto& all = fiber.units.hidden;
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i]->values.get() != joint.sums[thread]) continue;
      if (--all[i]->flying == 0) {
        for (unsigned j = 0; j < all[i]->count; ++j) {
          unsigned bits;
          memcpy(&bits, all[i]->visible + j, sizeof bits);
          if (bits == ~0u) continue;
          report(fiber, joint.line, "sums of a product were written before it was waited for");
          break;
        }
        memcpy(all[i]->visible, all[i]->values.get(), all[i]->count * sizeof(float));
        all.erase(all.begin() + static_cast<long>(i));
      }
      break;
    }
  }
}

// The first product of a thread's warpgroup that is in flight, or the number of all flights.
size_t Scheduler::product_of(const Fiber& fiber) const {
  size_t index = 0;
  for (; index < flights_.size(); ++index) {
    const Flight& flight = *flights_[index];
    if (flight.unit == Flight::Unit::product && flight.block == fiber.owner &&
        flight.warpgroup == fiber.number / 128)
      break;
  }
  return index;
}

void Scheduler::commit_products(Fiber& fiber) {
  fiber.units.groups.push_back(fiber.units.products);
  fiber.units.fenced = false;
  perhaps_yield(fiber);
}

void Scheduler::wait_products(Fiber& fiber, unsigned groups, int line) {
  const auto& ends = fiber.units.groups;
  if (ends.size() <= groups) return;
  const unsigned long long target = ends[ends.size() - 1 - groups];
  const Warpgroup& warpgroup = fiber.owner->units.warpgroups[fiber.number / 128];
  fiber.units.waits_for_products = target;
  while (warpgroup.done < target) {
    const size_t index = product_of(fiber);
    if (index < flights_.size()) {
      land_or_poll(fiber, index, "wgmma_wait", line);
    } else {
      poll(fiber, "wgmma_wait", line);
    }
  }
  fiber.units.waits_for_products = 0;
  progress_ = true;
}

}  // namespace emulator

using namespace emulator;

#define SELF (*static_cast<Fiber*>(fagen_self))

extern "C" {

void fagen_barrier_init(unsigned address, unsigned arrivals, int line) {
  Unwatched unwatched;
  scheduler->init_barrier(SELF, address, arrivals, line);
}

void fagen_barrier_publish() {
  Unwatched unwatched;
  scheduler->publish_barriers(SELF);
}

void fagen_barrier_arrive(unsigned address, unsigned bytes, int line) {
  Unwatched unwatched;
  scheduler->arrive(SELF, address, bytes, line);
}

void fagen_barrier_wait(unsigned address, unsigned parity, int line) {
  Unwatched unwatched;
  scheduler->wait_phase(SELF, address, parity, line);
}

void fagen_group_barrier(int number, unsigned threads, bool waits, int line) {
  Unwatched unwatched;
  scheduler->group_barrier(SELF, number, threads, waits, line);
}

bool fagen_set_registers(unsigned count, bool grows, int line) {
  Unwatched unwatched;
  return scheduler->set_registers(SELF, count, grows, line);
}

unsigned fagen_elected_lane() {
  return SELF.owner->units.elected;
}

void fagen_load(const FagenTransfer* transfer, int line) {
  Unwatched unwatched;
  scheduler->issue_load(SELF, *transfer, line);
}

void fagen_store(const FagenTransfer* transfer, int line) {
  Unwatched unwatched;
  scheduler->issue_store(SELF, *transfer, line);
}

void fagen_store_commit() {
  SELF.units.stores_committed += 1;
}

void fagen_store_wait(unsigned groups, bool only_reads, int line) {
  Unwatched unwatched;
  scheduler->wait_stores(SELF, groups, only_reads, line);
}

void fagen_note_write(unsigned address, unsigned bytes, int line) {
  Unwatched unwatched;
  scheduler->note_write(SELF, address, bytes, line);
}

void fagen_fence_async() {
  SELF.units.async_fences += 1;
}

void fagen_product_fence() {
  SELF.units.fenced = true;
}

void fagen_product(const FagenGroupProduct* product, int line) {
  Unwatched unwatched;
  scheduler->issue_product(SELF, *product, line);
}

void fagen_product_commit() {
  Unwatched unwatched;
  scheduler->commit_products(SELF);
}

void fagen_product_wait(unsigned groups, int line) {
  Unwatched unwatched;
  scheduler->wait_products(SELF, groups, line);
}
}
