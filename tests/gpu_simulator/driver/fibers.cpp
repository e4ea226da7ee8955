// Kernels: every thread is a fiber, which runs until it ends or waits for others at a barrier or in a shuffle.
//
// A block's threads run one after the other, each as far as it can: of all orders that CUDA allows the furthest apart.
// What only works because threads run together is found: a barrier or a lane that is missed, and memory that two
// threads share without a barrier between them.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "state.hpp"

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace gpu {
namespace {

// Not a power of 2, so that the stacks of a block do not fight for the same lines of the cache.
constexpr size_t STACK = (64 << 10) + 13 * 64;
constexpr size_t MOST_LOOKS = 1000;

#ifdef __x86_64__
using Place = void*;
extern "C" void gpu_switch(void** save, void* load);
asm(R"(
.text
.globl gpu_switch
.hidden gpu_switch
gpu_switch:
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
)");
#else
using Place = ucontext_t;
#endif

enum State { READY, AT_BARRIER, AT_SHUFFLE, ENDED };

struct Team;

struct Fiber : Thread {
  Place place;
  Team* team;
  State state = READY;
  int line = 0;
  uint32_t received = 0;  // From a shuffle.
  uint32_t rank;          // In the block.
};

struct Warp {
  uint32_t arrived = 0, ended = 0, mask = 0, values[32];
  int sources[32], line = 0;
  void* brought[32];
};

// Who touched a word of shared memory last, and behind which barrier. Thread -1: several.
struct Touch {
  int writer = -2, reader = -2;
  uint32_t written = 0, read = 0;
};

// One block: the threads that meet.
struct Team {
  Block block;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<char> shared;
  std::vector<Touch> touches;
  std::deque<Fiber*> ready;  // Threads that can run, in the order of their turns.
  uint32_t waiting = 0, alive = 0, epoch = 1;
  int barrier_line = 0;
};

struct Run {
  const Launch* launch;
  Place scheduler;
  std::vector<Team> teams;
  size_t turn = 0;  // The team that runs: as far as it can, before another does.
  Fiber* current = nullptr;
  size_t alive = 0;  // Threads that have not ended.
  size_t looks = 0;  // Turns since one did more than look whether memory has changed.
  std::string error;
  Result code = SUCCESS;
};

Run* now = nullptr;
char* stacks = nullptr;
size_t num_stacks = 0;

void change(Place* from, Place* to) {
#ifdef __x86_64__
  gpu_switch(from, *to);
#else
  swapcontext(from, to);
#endif
}

// The next thread to run; nullptr where none can, or where all that can only look whether memory has changed.
Fiber* next() {
  if (!now->error.empty() || now->looks > MOST_LOOKS * now->alive) return nullptr;
  for (size_t teams = now->teams.size(), tried = 0; tried < teams; tried++, now->turn = (now->turn + 1) % teams) {
    auto& ready = now->teams[now->turn].ready;
    if (ready.empty()) continue;
    now->current = ready.front();
    ready.pop_front();
    return now->current;
  }
  return nullptr;
}

// Let others run; returns when it is this thread's turn again.
void leave(Fiber* fiber) {
  Fiber* other = next();
  if (other != fiber) change(&fiber->place, other ? &other->place : &now->scheduler);
}

void wake(Fiber* fiber) {
  fiber->state = READY;
  fiber->team->ready.push_back(fiber);
}

[[noreturn]] void give_up(Fiber* fiber, Result code, const std::string& why, int line) {
  if (now->error.empty()) {
    auto name = [](const uint32_t* of) { return std::to_string(of[0]) + "," + std::to_string(of[1]) + "," + std::to_string(of[2]); };
    now->error = std::string("kernel ") + now->launch->kernel->name + ", block " + name(fiber->team->block.ctaid) +
                 ", thread " + std::to_string(fiber->rank) + ", line " + std::to_string(line) + " of its PTX: " + why;
    now->code = code;
  }
  for (;;) leave(fiber);
}

std::string hexadecimal(uint64_t value) {
  char text[32];
  snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

void release_barrier(Team* team) {
  team->waiting = 0;
  team->epoch++;
  now->looks = 0;
  auto release = [](Fiber& fiber) {
    if (fiber.state == AT_BARRIER) wake(&fiber);
  };
  if (world().backwards) std::for_each(team->fibers.rbegin(), team->fibers.rend(), release);
  else std::for_each(team->fibers.begin(), team->fibers.end(), release);
}

void find(Thread* thread, uint64_t address, unsigned size, Range* range, int line) {
  auto* fiber = static_cast<Fiber*>(thread);
  if (address % size) give_up(fiber, ILLEGAL_ADDRESS, hexadecimal(address) + " is not aligned to " + std::to_string(size), line);
  const Allocation* found = holds(address, size);
  if (!found) give_up(fiber, ILLEGAL_ADDRESS, std::to_string(size) + " bytes at " + hexadecimal(address) + " belong to no allocation", line);
  Device* own = now->launch->device;
  if (found->device && found->device != own && !own->peers.count(found->device->number))
    give_up(fiber, ILLEGAL_ADDRESS, "memory of GPU " + std::to_string(found->device->number) + " without peer access", line);
  range->first = found->first;
  range->last = found->first + found->size;
}

void* shared(Thread* thread, uint64_t offset, unsigned size, bool writes, int line) {
  auto* fiber = static_cast<Fiber*>(thread);
  Team* team = fiber->team;
  if (offset + size > team->shared.size()) give_up(fiber, ILLEGAL_ADDRESS, "beyond shared memory", line);
  int rank = static_cast<int>(fiber->rank);
  for (uint64_t word = offset / 4; word < (offset + size + 3) / 4; word++) {
    Touch& touch = team->touches[word];
    bool race = touch.written == team->epoch && touch.writer != rank;
    if (writes) race |= touch.read == team->epoch && touch.reader != rank;
    if (race) give_up(fiber, LAUNCH_FAILED, "a race in shared memory: no barrier since another thread touched it", line);
    if (writes) touch.writer = rank, touch.written = team->epoch;
    else touch.reader = touch.read == team->epoch && touch.reader != rank ? -1 : rank, touch.read = team->epoch;
  }
  return team->shared.data() + offset;
}

void barrier(Thread* thread, int line) {
  auto* fiber = static_cast<Fiber*>(thread);
  Team* team = fiber->team;
  if (team->waiting && team->barrier_line != line)
    give_up(fiber, LAUNCH_FAILED, "another barrier than others wait at, line " + std::to_string(team->barrier_line), line);
  team->barrier_line = fiber->line = line;
  fiber->state = AT_BARRIER;
  if (++team->waiting == team->alive) release_barrier(team);
  leave(fiber);
}

// Whether a lane is the last of `mask` to come to an instruction that they do together.
bool is_last(Fiber* fiber, Warp& warp, uint32_t mask, int line) {
  uint32_t lane = fiber->rank % 32;
  if (!(mask >> lane & 1)) give_up(fiber, LAUNCH_FAILED, "a shuffle without its own lane", line);
  if (mask & warp.ended) give_up(fiber, LAUNCH_FAILED, "a shuffle with a lane that has ended", line);
  if (warp.arrived && (warp.mask != mask || warp.line != line))
    give_up(fiber, LAUNCH_FAILED, "another shuffle than other lanes wait in, line " + std::to_string(warp.line), line);
  warp.mask = mask;
  warp.line = fiber->line = line;
  warp.arrived |= 1u << lane;
  fiber->state = AT_SHUFFLE;
  return warp.arrived == mask;
}

// Let the lanes that came go on; the last of them does at once.
void release(Fiber* fiber, Warp& warp) {
  for (uint32_t lane = 0; lane < 32; lane++) {
    Fiber& peer = fiber->team->fibers[fiber->rank / 32 * 32 + lane % 32];
    if (warp.mask >> lane & 1 && &peer != fiber) wake(&peer);
  }
  fiber->state = READY;
  warp.arrived = 0;
}

uint32_t shuffle(Thread* thread, uint32_t value, int source, uint32_t mask, int line) {
  auto* fiber = static_cast<Fiber*>(thread);
  Warp& warp = fiber->team->warps[fiber->rank / 32];
  uint32_t lane = fiber->rank % 32;
  warp.values[lane] = value;
  warp.sources[lane] = source;
  if (is_last(fiber, warp, mask, line)) {
    uint32_t any = 0;
    for (uint32_t other = 0; other < 32; other++) any |= mask >> other & 1 && warp.values[other];
    for (uint32_t other = 0; other < 32; other++)
      if (mask >> other & 1)
        fiber->team->fibers[fiber->rank - lane + other].received = source == ANY_LANE ? any : warp.values[warp.sources[other]];
    release(fiber, warp);
  } else {
    leave(fiber);
  }
  return fiber->received;
}

void together(Thread* thread, void* brought, void (*work)(void* const*), int line) {
  auto* fiber = static_cast<Fiber*>(thread);
  Warp& warp = fiber->team->warps[fiber->rank / 32];
  warp.brought[fiber->rank % 32] = brought;
  if (!is_last(fiber, warp, ~0u, line)) return leave(fiber);
  work(warp.brought);
  release(fiber, warp);
}

// Another thread's turn, for a thread that looks whether memory has changed.
void yield(Thread* thread) {
  now->looks++;
  wake(static_cast<Fiber*>(thread));
  now->turn = (now->turn + 1) % now->teams.size();
  leave(static_cast<Fiber*>(thread));
}

void fail(Thread* thread, const char* what, int line) {
  give_up(static_cast<Fiber*>(thread), LAUNCH_FAILED, std::string("not simulated: ") + what, line);
}

const Services services = {find, shared, barrier, shuffle, together, yield, fail};

void begin() {
  Fiber* fiber = now->current;
  now->launch->kernel->run(fiber, now->launch->parameters.data());
  Team* team = fiber->team;
  Warp& warp = team->warps[fiber->rank / 32];
  warp.ended |= 1u << fiber->rank % 32;
  if (warp.arrived && (warp.mask & warp.ended)) give_up(fiber, LAUNCH_FAILED, "ended; other lanes wait for it in a shuffle", warp.line);
  fiber->state = ENDED;
  now->alive--;
  now->looks = 0;
  if (--team->alive && team->waiting == team->alive) release_barrier(team);
  for (;;) leave(fiber);
}

void prepare(Fiber* fiber, char* stack) {
#ifdef __x86_64__
  // As gpu_switch leaves a stack: six registers and where to return to, from a stack that is aligned as in a call.
  auto** top = reinterpret_cast<void**>(stack + STACK) - 2;
  *top = reinterpret_cast<void*>(begin);
  fiber->place = top - 6;
#else
  getcontext(&fiber->place);
  fiber->place.uc_stack.ss_sp = stack;
  fiber->place.uc_stack.ss_size = STACK;
  fiber->place.uc_link = nullptr;
  makecontext(&fiber->place, begin, 0);
#endif
}

void prepare(Team* team, const Launch& launch, uint32_t number, char* stacks) {
  for (int axis = 0; axis < 3; axis++) {
    team->block.nctaid[axis] = launch.grid[axis];
    team->block.ntid[axis] = launch.block[axis];
    team->block.ctaid[axis] = number % launch.grid[axis];
    number /= launch.grid[axis];
  }
  uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  team->alive = threads;
  team->fibers.resize(threads);
  team->warps.resize((threads + 31) / 32);
  if (threads % 32) team->warps.back().ended = ~0u << threads % 32;
  team->shared.assign(launch.kernel->shared_bytes, static_cast<char>(0xc9));  // Not zeros.
  team->touches.resize(launch.kernel->shared_bytes / 4 + 1);
  for (uint32_t rank = 0; rank < threads; rank++) {
    Fiber& fiber = team->fibers[rank];
    fiber.tid[0] = rank % launch.block[0];
    fiber.tid[1] = rank / launch.block[0] % launch.block[1];
    fiber.tid[2] = rank / launch.block[0] / launch.block[1];
    fiber.block = &team->block;
    fiber.services = &services;
    fiber.team = team;
    fiber.rank = rank;
    prepare(&fiber, stacks + rank * STACK);
    team->ready.push_back(&fiber);
  }
  if (world().backwards) std::reverse(team->ready.begin(), team->ready.end());
}

std::string who_waits(const std::vector<Team>& teams) {
  int barriers = 0, shuffles = 0, line = 0;
  for (const Team& team : teams)
    for (const Fiber& fiber : team.fibers) {
      barriers += fiber.state == AT_BARRIER, shuffles += fiber.state == AT_SHUFFLE;
      if (fiber.state != ENDED) line = fiber.line;
    }
  return std::to_string(barriers) + " threads wait at a barrier, " + std::to_string(shuffles) + " in a shuffle, line " + std::to_string(line);
}

// Blocks that run together until all have ended.
void run_together(const Launch& launch, uint32_t first, uint32_t count) {
  uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  if (size_t needed = static_cast<size_t>(threads) * count; needed > num_stacks) {
    if (stacks) munmap(stacks, num_stacks * STACK);
    stacks = static_cast<char*>(mmap(nullptr, needed * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    num_stacks = needed;
  }
  now->teams = std::vector<Team>(count);
  now->turn = 0;
  now->alive = static_cast<size_t>(threads) * count;
  for (uint32_t number = 0; number < count; number++) {
    uint32_t block = first + (world().backwards ? count - 1 - number : number);
    prepare(&now->teams[number], launch, block, stacks + static_cast<size_t>(number) * threads * STACK);
  }
  if (Fiber* fiber = next()) change(&now->scheduler, &fiber->place);  // Back when all have ended, or none can go on.
  if (!now->alive || !now->error.empty()) return;
  now->error = std::string("kernel ") + launch.kernel->name + ": a deadlock: " + who_waits(now->teams);
  now->code = LAUNCH_FAILED;
}

}  // namespace

void run(const Launch& launch) {
  Run run;
  run.launch = &launch;
  now = &run;
  std::fill(launch.kernel->ranges, launch.kernel->ranges + launch.kernel->num_ranges, Range{});
  uint32_t blocks = launch.grid[0] * launch.grid[1] * launch.grid[2];
  if (launch.cooperative) {
    run_together(launch, 0, blocks);
  } else {
    for (uint32_t block = 0; block < blocks && run.error.empty(); block++)
      run_together(launch, world().backwards ? blocks - 1 - block : block, 1);
  }
  now = nullptr;
  if (run.error.empty()) return;
  launch.device->broken = broken(run.code, run.error);
}

}  // namespace gpu
