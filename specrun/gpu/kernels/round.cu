// A round's arithmetic on the device: from logits to tokens, from draft tokens to committed ones.
//
// The formulas of specrun/sampling/penalties.py, sampler.py and acceptance.py, row by row. Functions of one row are
// written for a ThreadGroup and do not depend on its number of threads. The file compiles for CUDA (a group is one
// thread block or several) and as host C++ (a group is one thread, or some), so tests need no GPU.
//
// All reductions are integer maxima and sums, which do not depend on the order of the threads: a row's result is the
// same for every size of the group. Masses of probability are summed in fixed point for that reason.
//
// layout.py writes the types, numbers and structs that the host shares. They stand in front of this file.

#ifdef __CUDACC__
#define FUNCTION __device__ inline
#define KERNEL extern "C" __global__
#define ROW_KERNEL extern "C" __global__ __launch_bounds__(1024)  // As many registers as that many threads may have.
#else
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#define FUNCTION inline
#define KERNEL extern "C"
#define ROW_KERNEL extern "C"
// As the launch syntax does on the device, the host's caller walks over the grid, in every thread of a block.
struct Index { u32 x, y, z; };
static thread_local Index blockIdx, threadIdx;
static Index blockDim, gridDim;
static std::unique_ptr<std::barrier<>> block_barrier;
extern "C" void set_launch(u32 threads, u32 x, u32 y, u32 z) {
  blockDim.x = threads;
  gridDim = {x, y, z};
  block_barrier = std::make_unique<std::barrier<>>(threads);
}
extern "C" void set_thread(u32 thread) { threadIdx.x = thread; }
extern "C" void set_block(u32 x, u32 y, u32 z) { blockIdx = {x, y, z}; }
inline void __syncthreads() {
  if (blockDim.x > 1) block_barrier->arrive_and_wait();
}
// For blocks that wait for each other in memory: on the host a group has one.
inline void __threadfence() {}
inline void atomicMax(u64*, u64) {}
inline void atomicAdd(u64*, u64) {}
inline u32 atomicAdd(u32*, u32) { return 0; }
#endif

// ---------------------------------------------------------------------------------------------------------- threads

// The threads that work on one row together: of all blocks of the grid's third dimension, which must run at the same
// time (a cooperative launch, where there is more than one). Every thread must reach every call of its functions.
class ThreadGroup {
 public:
  FUNCTION explicit ThreadGroup(Barrier* barrier) : barrier(barrier) {}
  FUNCTION int rank() const { return blockIdx.z * blockDim.x + threadIdx.x; }
  FUNCTION int size() const { return gridDim.z * blockDim.x; }

  // What each thread has written before, all see behind it.
  FUNCTION void sync() {
    clear_next(threadIdx.x);
    __syncthreads();
    if (gridDim.z == 1) return;
    if (threadIdx.x == 0) arrive_and_wait();
    __syncthreads();
    phase++;
  }

  FUNCTION u64 reduce_max(u64 value) {
    u64 values[1] = {value};
    reduce(values, [](u64 a, u64 b) { return a > b ? a : b; }, [](u64* to, u64 value) { atomicMax(to, value); });
    return values[0];
  }
  template <int N>
  FUNCTION void reduce_sum(u64 (&values)[N]) {
    reduce(values, [](u64 a, u64 b) { return a + b; }, [](u64* to, u64 value) { atomicAdd(to, value); });
  }

  FUNCTION ~ThreadGroup() {
    if (gridDim.z == 1) return;
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(&barrier->left, 1u) + 1 < gridDim.z) return;
    *barrier = {};  // The last block leaves it as it was.
  }

 private:
  Barrier* barrier;
  u32 phase = 0;  // How often all blocks have arrived.

  // Combine every thread's values; all threads get the result. 0 changes nothing. `add` does it in memory, atomically.
  template <int N, typename Combine, typename Add>
  FUNCTION void reduce(u64 (&values)[N], Combine combine, Add add) {
#ifdef __CUDACC__
    __shared__ u64 parts[N][32];  // One of each warp.
    __shared__ u64 totals[N];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    auto reduce_warp = [&](u64 value) {
      for (int other = 16; other > 0; other /= 2) value = combine(value, __shfl_xor_sync(~0u, value, other));
      return value;
    };
    bool adds = false;
    for (int n = 0; n < N; n++) adds |= values[n] != 0;
    bool any = __any_sync(~0u, adds);  // Most warps add nothing in most reductions.
    for (int n = 0; n < N; n++) {
      u64 part = any ? reduce_warp(values[n]) : 0;
      if (lane == 0) parts[n][warp] = part;
    }
    __syncthreads();
    for (int n = warp; n < N; n += warps) {
      u64 total = reduce_warp(lane < warps ? parts[n][lane] : 0);
      if (lane == 0) totals[n] = total;
    }
    __syncthreads();
    if (gridDim.z > 1) {
      if (warp == 0) {
        u64* shared = barrier->values[phase % 3];
        if (lane < N) add(shared + lane, totals[lane]);
        clear_next(lane);
        __threadfence();
        __syncwarp();
        if (lane == 0) arrive_and_wait();
        __syncwarp();
        if (lane < N) totals[lane] = *(volatile u64*)(shared + lane);
      }
      __syncthreads();
      phase++;
    }
    for (int n = 0; n < N; n++) values[n] = totals[n];
#else
    static u64 parts[64][N];  // Of each thread.
    (void)add;
    for (int n = 0; n < N; n++) parts[rank()][n] = values[n];
    __syncthreads();
    for (int n = 0; n < N; n++) {
      values[n] = parts[0][n];
      for (int other = 1; other < size(); other++) values[n] = combine(values[n], parts[other][n]);
    }
    __syncthreads();  // `parts` is free for the next reduction.
#endif
  }

  // Make room for the values of the next phase: all blocks have arrived in the one before this, so no block reads the
  // values of the one before that any more.
  FUNCTION void clear_next(int index) const {
    if (gridDim.z > 1 && blockIdx.z == 0 && index < MAX_SUMS) barrier->values[(phase + 1) % 3][index] = 0;
  }

  // One thread of each block: wait until all blocks have arrived.
  FUNCTION void arrive_and_wait() const {
    __threadfence();
    atomicAdd(&barrier->arrived, 1u);
    while (*(volatile u32*)&barrier->arrived < gridDim.z * (phase + 1)) {}
    __threadfence();
  }
};

FUNCTION u32 float_bits(float value) {
#ifdef __CUDACC__
  return __float_as_uint(value);
#else
  u32 bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

FUNCTION float bits_float(u32 bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

FUNCTION float infinity() { return bits_float(0x7f800000u); }

// A score and who has it as one integer: the larger score wins, among equals the smaller id.
FUNCTION u64 scored(float score, int id) {
  u32 bits = float_bits(score + 0.0f);  // -0 becomes +0.
  u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (u64)ordered << 32 | (0xffffffffu - (u32)id);
}
FUNCTION int scored_id(u64 best) { return (int)(0xffffffffu - (u32)best); }
FUNCTION float scored_value(u64 best) {
  u32 ordered = (u32)(best >> 32);
  return bits_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// --------------------------------------------------------------------------------------------------- random numbers

struct Words { u64 word[4]; };

FUNCTION u64 high_product(u64 a, u64 b) {
#ifdef __CUDACC__
  return __umul64hi(a, b);
#else
  return (u64)((unsigned __int128)a * b >> 64);
#endif
}

// Philox4x64-10 (Salmon et al., 2011): block `index` of the stream of (seed, purpose, position), as numpy counts them.
FUNCTION Words random_words(u64 seed, u64 purpose, u64 position, u64 index) {
  Words c = {{index + 1, position, 0, 0}};
  u64 key0 = seed, key1 = purpose;
  for (int round = 0; round < 10; round++) {
    u64 high0 = high_product(0xD2E7470EE14C6C93ull, c.word[0]), low0 = 0xD2E7470EE14C6C93ull * c.word[0];
    u64 high1 = high_product(0xCA5A826395121157ull, c.word[2]), low1 = 0xCA5A826395121157ull * c.word[2];
    c = {{high1 ^ c.word[1] ^ key0, low1, high0 ^ c.word[3] ^ key1, low0}};
    key0 += 0x9E3779B97F4A7C15ull;
    key1 += 0xBB67AE8584CAA73Bull;
  }
  return c;
}

FUNCTION double uniform(u64 seed, u64 purpose, u64 position) {
  return (double)(random_words(seed, purpose, position, 0).word[0] >> 11) * 0x1p-53;
}

// Exp(1) from 32 random bits.
FUNCTION float exponential_noise(u32 bits) {
  float u = ((float)bits + 0.5f) * 0x1p-32f;
  return -log1pf(-(u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f));
}

// ---------------------------------------------------------------------------------------------------- distributions

FUNCTION float raw_weight(const Distribution& d, float logit) { return expf((logit - d.peak) / d.temperature); }

FUNCTION float probability(const Distribution& d, float logit) {
  float weight = raw_weight(d, logit);
  return weight >= d.smallest ? weight / d.total : 0.0f;
}

// A weight of at most 1 in fixed point: a whole vocabulary's have room in 64 bits.
static_assert((u64)MAX_VOCAB << 44 <= 1ull << 63, "the sum of all masses");
FUNCTION u64 mass(float weight) { return (u64)(weight * 0x1p44f + 0.5f); }

struct alignas(16) Four { float value[4]; };

// take(value, v) for this thread's share of `count` values: 16 bytes at a time, where they begin at such an address.
template <typename Take>
FUNCTION void each(const ThreadGroup& group, const float* values, int count, Take take) {
  int quads = (u64)values % sizeof(Four) == 0 ? count / 4 : 0;
  for (int quad = group.rank(); quad < quads; quad += group.size()) {
    Four four = ((const Four*)values)[quad];
    for (int i = 0; i < 4; i++) take(four.value[i], quad * 4 + i);
  }
  for (int v = quads * 4 + group.rank(); v < count; v += group.size()) take(values[v], v);
}

enum Measure { COUNT, MASS };
enum { FEW = 16 };  // Weights that a thread of `select_threshold` keeps.

// The largest v with measure(weights >= v) >= limit, at least d.smallest: the smallest weight to keep, with its ties.
// It is found three bits at a time, the highest first: by sums alone, since most weights share a few exponents, and
// counters that many threads want at once are slow. A thread that has few of the weights that begin like v keeps them
// and reads no others.
FUNCTION float select_threshold(
    ThreadGroup& group, const float* logits, int vocab, const Distribution& d, Measure measure, u64 limit) {
  u32 prefix = 0;   // The bits of v from `shift` + 3 on; weights are at most 1, so the highest two are 0.
  u64 above = 0;   // The measure of the weights that begin with more.
  float few[FEW];  // This thread's weights that begin with `prefix`, or did when it began to keep them.
  int num_few = 0;
  bool are_few = false;
  for (int shift = 27; shift >= 0; shift -= 3) {
    u64 sums[7] = {};  // Of those whose next three bits are at least 1, 2, .. 7.
    auto add = [&](float weight) {
      u32 bits = float_bits(weight);
      if (bits >> (shift + 3) != prefix) return false;
      u64 amount = measure == COUNT ? 1 : mass(weight);
      for (u32 i = 0; i < 7; i++) sums[i] += (bits >> shift & 7) > i ? amount : 0;
      return true;
    };
    if (are_few) {
      for (int i = 0; i < num_few; i++) add(few[i]);
    } else {
      num_few = 0;
      each(group, logits, vocab, [&](float logit, int) {
        float weight = raw_weight(d, logit);
        if (add(weight) && num_few++ < FEW) few[num_few - 1] = weight;
      });
      are_few = num_few <= FEW;
    }
    group.reduce_sum(sums);
    u32 next = 7;
    while (next > 0 && above + sums[next - 1] < limit) next--;
    if (next < 7) above += sums[next];
    prefix = prefix << 3 | next;
  }
  return fmaxf(bits_float(prefix), d.smallest);
}

FUNCTION u64 kept_mass(ThreadGroup& group, const float* logits, int vocab, const Distribution& d) {
  u64 sums[1] = {0};
  each(group, logits, vocab, [&](float logit, int) {
    float weight = raw_weight(d, logit);
    if (weight >= d.smallest) sums[0] += mass(weight);
  });
  group.reduce_sum(sums);
  return sums[0];
}

// Temperature, then min-p, top-k, top-p, as `probabilities` in sampler.py.
FUNCTION Distribution distribution(ThreadGroup& group, const float* logits, int vocab, const Sampling& s) {
  const u64 not_a_number = ~0ull;
  u64 best = 0;
  each(group, logits, vocab, [&](float logit, int v) {
    u64 candidate = logit < infinity() ? scored(logit, v) : not_a_number;
    if (candidate > best) best = candidate;
  });
  best = group.reduce_max(best);
  Distribution d = {scored_value(best), scored_id(best), s.temperature, 0.0f, 1.0f};
  if (best == not_a_number || d.peak == -infinity()) d.best = -1;
  if (d.best < 0 || s.temperature == 0) return d;
  d.smallest = s.min_p;  // The likeliest token's weight is 1.
  d.temperature = fminf(fmaxf(s.temperature, 1e-37f), 1e38f);
  if (s.top_k > 0 && s.top_k < vocab) d.smallest = select_threshold(group, logits, vocab, d, COUNT, s.top_k);
  if (s.top_p < 1) {
    double total = (double)kept_mass(group, logits, vocab, d);
    d.smallest = select_threshold(group, logits, vocab, d, MASS, (u64)ceil(s.top_p * total));
  }
  // A draw is the same for every total.
  if (s.use_logits) d.total = (float)((double)kept_mass(group, logits, vocab, d) * 0x1p-44);
  return d;
}

// A draw in proportion to the scores, by the Gumbel-max trick: argmax of score(v) / E_v over the vocabulary, with the
// exponential noise E of (seed, purpose, position). -1 where every score is 0.
template <typename Score>
FUNCTION int gumbel_argmax(ThreadGroup& group, int vocab, u64 seed, u64 purpose, u64 position, Score score) {
  u64 best = 0;
  for (int block = group.rank(); block * 8 < vocab; block += group.size()) {
    int first = block * 8, count = vocab - first < 8 ? vocab - first : 8;
    float scores[8];
    bool any = false;
    for (int i = 0; i < 8; i++) {
      scores[i] = i < count ? score(first + i) : 0.0f;
      any |= scores[i] > 0;
    }
    if (!any) continue;
    Words words = random_words(seed, purpose, position, block);
    for (int i = 0; i < 8; i++) {
      if (!(scores[i] > 0)) continue;
      u64 candidate = scored(scores[i] / exponential_noise((u32)(words.word[i / 2] >> (i % 2 * 32))), first + i);
      if (candidate > best) best = candidate;
    }
  }
  best = group.reduce_max(best);
  return best ? scored_id(best) : -1;
}

// The token a model chooses at `position`; -1 where the logits are not numbers.
FUNCTION int sample(
    ThreadGroup& group, const float* logits, int vocab, const Distribution& d, u64 seed, u64 purpose, u64 position) {
  if (d.best < 0 || d.temperature == 0) return d.best;
  return gumbel_argmax(group, vocab, seed, purpose, position, [&](int v) { return probability(d, logits[v]); });
}

// ------------------------------------------------------------------------------------------------------- acceptance

struct Verdict {
  int accepted;   // Draft tokens that stand.
  int next_token;  // The target's token after them; -1 where logits were not numbers.
};

// The target adds a token of its own, so the last token of a row is never drafted.
FUNCTION int draft_count(const Progress& p, const Sampling& s, int draft_len) {
  int count = s.draft_len < draft_len ? s.draft_len : draft_len;
  if (p.remaining - 1 < count) count = p.remaining - 1;
  return count > 0 ? count : 0;
}

// Greedy, both rules of acceptance are the same.
FUNCTION bool compares_tokens(const Sampling& s) { return !s.use_logits || s.temperature == 0; }

// How many of `count` draft tokens there are: the draft fails at the first one that is -1.
FUNCTION int drawn_drafts(const i64* drafts, int count) {
  int drawn = 0;
  while (drawn < count && drafts[drawn] >= 0) drawn++;
  return drawn;
}

// Draft tokens stand while they are the target's own choice.
FUNCTION Verdict compare_tokens(const i64* drafts, const int* chosen, int count) {
  int accepted = 0;
  while (accepted < count && drafts[accepted] == chosen[accepted]) accepted++;
  return {accepted, chosen[accepted]};
}

// Modified rejection sampling (arXiv 2302.01318, 2211.17192); see accept_logits in acceptance.py.
// p, q: distributions of the target's and the draft's logits at each draft position; draft ids end at draft_vocab.
// last: the target's choice after all of them.
FUNCTION Verdict compare_logits(
    ThreadGroup& group, const i64* drafts, int count, const Distribution* q, const float* draft_logits,
    i64 draft_row, int draft_vocab, const Distribution* p, const float* target_logits, int vocab, int last, u64 seed,
    u64 position) {
  for (int i = 0; i < count; i++) {
    const float *target = target_logits + (i64)i * vocab, *draft = draft_logits + i * draft_row;
    i64 token = drafts[i];
    if (p[i].best < 0) return {i, -1};
    auto drafted = [&](int v) {  // The probability that the draft gave to v.
      if (q[i].temperature == 0) return v == q[i].best ? 1.0f : 0.0f;
      return v < draft_vocab ? probability(q[i], draft[v]) : 0.0f;
    };
    double u = uniform(seed, ACCEPT, position + i);
    if (u * (double)drafted((int)token) < (double)probability(p[i], target[token])) continue;
    int next_token = gumbel_argmax(group, vocab, seed, TARGET, position + i, [&](int v) {
      return fmaxf(probability(p[i], target[v]) - drafted(v), 0.0f);
    });
    // p == q up to rounding leaves nothing over; p is then the remainder's limit.
    if (next_token < 0) next_token = sample(group, target, vocab, p[i], seed, TARGET, position + i);
    return {i, next_token};
  }
  return {count, last};
}

// Integers of a row's record; see Record in layout.py.
FUNCTION int record_len(int draft_len) { return Record::DRAFTS + draft_len; }

// Append a round's tokens up to a stop id or the row's end, count them where there are counts, and write the row's
// record [record_len]. A row whose draft has failed, so that fewer than `max_count` tokens were drafted, drafts no
// more: its next round may be queued before the host reads the failure. (Masks may have left a constrained row no
// token; its next round drafts again.) Where the target has no token after accepted ones, the last of these becomes the
// next token: the next round begins there and fails, unless the text ends before.
FUNCTION void commit(
    Progress* progress, Sampling* sampling, i64* tokens, const i64* stop_ids, u32* counts, int max_count, int drafted,
    const Verdict& verdict, i64* record) {
  Progress p = *progress;
  int accepted = verdict.accepted, next_token = verdict.next_token;
  if (next_token < 0 && accepted > 0) next_token = tokens[p.length + --accepted];
  if (drafted < max_count && !sampling->constrained) sampling->draft_len = 0;
  record[Record::DRAFTED] = drafted;
  record[Record::ACCEPTED] = accepted;
  record[Record::NEXT_TOKEN] = next_token;
  for (int i = 0; i < drafted; i++) record[Record::DRAFTS + i] = tokens[p.length + i];
  if (next_token < 0) p.remaining = 0;
  else tokens[p.length + accepted] = next_token;
  for (int i = 0; i <= accepted && p.remaining > 0; i++) {
    i64 token = tokens[p.length++];
    p.remaining--;
    if (counts) counts[token]++;
    for (int stop = 0; stop < sampling->stops; stop++)
      if (token == stop_ids[stop]) p.remaining = 0;
  }
  *progress = p;
}

// ----------------------------------------------------------------------------- logits processors and log-probabilities

// counts [V] of a row: how often its output has each token, and IN_PROMPT.

FUNCTION bool has_penalties(const Sampling& s) { return s.repetition != 1 || s.presence != 0 || s.frequency != 0; }

// Whether logits of a row's next round are changed before they become a distribution. It stays as it is until `accept`
// commits.
FUNCTION bool has_logits_processors(const Sampling& s, const Progress& p) {
  return has_penalties(s) || s.biases > 0 || s.constrained || (s.stops > 0 && p.length < s.free_length);
}

// See adjust in penalties.py. drafts: number of draft tokens before. forbidden: number of stop ids that must not come.
// logits and adjusted may be the same memory.
FUNCTION void apply_penalties_to_row(
    ThreadGroup& group, const float* logits, int vocab, const Sampling& s, const u32* counts, const i64* tokens,
    int drafts, const TokenValue* biases, const i64* stop_ids, int forbidden, float* adjusted) {
  // Penalties that are off change nothing, whatever the counts.
  for (int v = group.rank(); v < vocab; v += group.size()) {
    u32 output = counts[v] & ~IN_PROMPT;
    for (int i = 0; i < drafts; i++) output += tokens[i] == v;
    float logit = logits[v];
    if (output || counts[v] & IN_PROMPT) logit = logit > 0 ? logit / s.repetition : logit * s.repetition;
    if (output) logit -= s.presence + s.frequency * (float)output;
    adjusted[v] = logit;
  }
  group.sync();
  for (int i = group.rank(); i < s.biases; i += group.size())
    if (biases[i].id < vocab) adjusted[biases[i].id] += biases[i].value;
  group.sync();
  for (int i = group.rank(); i < forbidden; i += group.size())
    if (stop_ids[i] < vocab) adjusted[stop_ids[i]] = -infinity();
}

FUNCTION float log_probability(const Distribution& d, float logit) {
  return (float)((double)logit - d.peak - log((double)d.total));
}

// The `count` likeliest ids in order, among equals the smaller one first; -1 where the vocabulary has no more.
FUNCTION void likeliest(
    ThreadGroup& group, const float* logits, int vocab, const Distribution& d, int count, TokenValue* logprobs) {
  u64 previous = ~0ull;
  for (int i = 0; i < count; i++) {
    u64 best = 0;
    each(group, logits, vocab, [&](float logit, int v) {
      u64 candidate = scored(logit, v);
      if (candidate < previous && candidate > best) best = candidate;
    });
    previous = group.reduce_max(best);
    if (group.rank() > 0) continue;
    if (previous) logprobs[i] = {scored_id(previous), log_probability(d, scored_value(previous))};
    else logprobs[i] = {-1, -infinity()};
  }
}

// ---------------------------------------------------------------------------------------------------------- kernels
// A ThreadGroup per row (blockIdx.x), and per position where there are several (blockIdx.y); barriers [B, positions].
// tokens [B, token_stride]: committed and draft tokens; progress [B]; sampling [B]; distributions [B, positions];
// stop_ids [B, MAX_STOP_IDS]; draft_len: the most draft tokens of this round.

FUNCTION ThreadGroup group_of(Barrier* barriers) { return ThreadGroup(barriers + blockIdx.x * gridDim.y + blockIdx.y); }

// An engine's inputs: `query_len` tokens of each row from progress.length + offset on, written where they stand, and
// `num_logits` positions to compute logits of, the first at progress.length + first_logit. One thread per row.
KERNEL void feed(
    const i64* tokens, int token_stride, const Progress* progress, int offset, int query_len, int first_logit,
    int num_logits, int capacity, int vocab, i64* input_ids, i64* write_indices, i64* logits_indices) {
  int row = blockIdx.x, length = progress[row].length;
  int start = length + offset;
  // A row at its end is fed along with the others; it may write junk behind its tokens, but not behind the cache.
  if (start > capacity - query_len) start = capacity - query_len;
  if (start < 0) start = 0;
  for (int i = 0; i < query_len; i++) {
    i64 token = tokens[(i64)row * token_stride + (start + i < token_stride ? start + i : token_stride - 1)];
    // A target with a padded embedding may commit ids that a draft without the padding has no row for; -1 is a draft
    // token that could not be drawn, which acceptance reports.
    input_ids[row * query_len + i] = token < 0 ? 0 : token < vocab ? token : vocab - 1;
  }
  write_indices[row] = start;
  for (int i = 0; i < num_logits; i++) {
    int index = length + first_logit + i - start;
    logits_indices[row * num_logits + i] = index < 0 ? 0 : index < query_len ? index : query_len - 1;
  }
}

// The inputs of recurrent layers for a pass that `feed` has prepared. state_indices: how many tokens of each row its
// states have read (`read`). keep_indices: how many they are to read, all committed tokens but the last `held_back`,
// which the next round may feed again. States do not change where a row does not decode, or has ended and was not fed
// for a while: both indices are then where its new tokens begin, and it does not advance. One thread per row.
KERNEL void begin_states(
    const Progress* progress, const i64* write_indices, const i64* read, int held_back, int replays, i64* state_indices,
    i64* keep_indices, int* advances) {
  int row = blockIdx.x;
  i64 begin = write_indices[row], state = read[row], keep = progress[row].length - held_back;
  advances[row] = progress[row].remaining > 0 && state <= begin && begin - state <= replays;
  if (!advances[row]) state = keep = begin;
  state_indices[row] = state;
  keep_indices[row] = keep > state ? keep : state;
}

// Change the logits of `positions` positions, the first behind `first` draft tokens, by the rows' texts and sampling
// parameters: logits and adjusted [B, positions, stride], of which `vocab` ids count; both may be the same memory. Rows
// without penalties, biases and forbidden ids are not written.
// counts [B, counted]; biases [B, MAX_BIASES].
ROW_KERNEL void apply_penalties(
    const float* logits, int stride, int vocab, int positions, int first, const i64* tokens, int token_stride,
    const Progress* progress, int draft_len, const Sampling* sampling, const u32* counts, int counted,
    const TokenValue* biases, const i64* stop_ids, float* adjusted, Barrier* barriers) {
  int row = blockIdx.x, drafts = first + blockIdx.y;
  i64 start = ((i64)row * positions + blockIdx.y) * stride;
  const Sampling& s = sampling[row];
  const Progress& p = progress[row];
  if (!has_logits_processors(s, p) || p.remaining == 0 || drafts > draft_count(p, s, draft_len)) return;
  ThreadGroup group = group_of(barriers);
  int forbidden = p.length + drafts < s.free_length ? s.stops : 0;
  apply_penalties_to_row(
      group, logits + start, vocab, s, counts + (i64)row * counted, tokens + (i64)row * token_stride + p.length, drafts,
      biases + row * MAX_BIASES, stop_ids + row * MAX_STOP_IDS, forbidden, adjusted + start);
}

// Forbid tokens of constrained rows in adjusted [B, positions, stride], which `apply_penalties` has written: bit v % 32
// of word v / 32 of masks [B, positions, words] says whether v < vocab may come.
KERNEL void apply_masks(
    const u32* masks, int words, const Sampling* sampling, int stride, int vocab, float* adjusted) {
  if (!sampling[blockIdx.x].constrained) return;
  i64 position = (i64)blockIdx.x * gridDim.y + blockIdx.y;
  masks += position * words;
  for (int v = blockIdx.z * blockDim.x + threadIdx.x; v < vocab; v += gridDim.z * blockDim.x)
    if (!(masks[v / 32] >> v % 32 & 1)) adjusted[position * stride + v] = -infinity();
}

// Add to the logits [B, stride] of draft token `step` w2 [rank, vocab] times the row of w1 [V, rank] of the token
// before it. Neighbouring threads read neighbouring columns of w2.
KERNEL void apply_markov(
    const i64* tokens, int token_stride, const Progress* progress, int step, const float* w1, const float* w2, int rank,
    int vocab, float* logits, int stride) {
  int row = blockIdx.x, length = progress[row].length;
  i64 before = length > 0 ? tokens[(i64)row * token_stride + length + step - 1] : -1;
  if (before < 0) return;  // A row that was never used, or a draft that has failed.
  const float* embedding = w1 + before * rank;
  for (int v = blockIdx.z * blockDim.x + threadIdx.x; v < vocab; v += gridDim.z * blockDim.x) {
    float sum = 0;
    for (int i = 0; i < rank; i++) sum += embedding[i] * w2[(i64)i * vocab + v];
    logits[(i64)row * stride + v] += sum;
  }
}

// Sample draft token `step` of each row from logits [B, stride], and append it behind the committed tokens. Exact-match
// acceptance draws it with the target's random numbers.
ROW_KERNEL void sample_draft(
    const float* logits, int stride, int vocab, i64* tokens, int token_stride, const Progress* progress, int draft_len,
    const Sampling* sampling, int step, Distribution* distributions, Barrier* barriers) {
  int row = blockIdx.x;
  ThreadGroup group = group_of(barriers);
  const Sampling& s = sampling[row];
  if (step >= draft_count(progress[row], s, draft_len)) return;
  const float* row_logits = logits + (i64)row * stride;
  Distribution d = distribution(group, row_logits, vocab, s);
  int position = progress[row].length + step;
  int token = sample(group, row_logits, vocab, d, s.seed, s.use_logits ? DRAFT : TARGET, position);
  if (group.rank() == 0) {
    distributions[row * draft_len + step] = d;
    tokens[(i64)row * token_stride + position] = token;  // -1: the draft fails here.
  }
}

// The target's distributions [B, draft_len + 1] of logits [B, draft_len + 1, vocab], or of `adjusted` for rows with
// logits processors. It samples chosen [B, draft_len + 1] where tokens are compared and after a row's last draft token.
ROW_KERNEL void sample_target(
    const float* logits, const float* adjusted, int vocab, const Progress* progress, int draft_len,
    const Sampling* sampling, Distribution* distributions, int* chosen, Barrier* barriers) {
  int row = blockIdx.x, position = blockIdx.y, index = row * (draft_len + 1) + position;
  ThreadGroup group = group_of(barriers);
  const Sampling& s = sampling[row];
  int count = draft_count(progress[row], s, draft_len);
  if (progress[row].remaining == 0 || position > count) return;
  const float* row_logits = (has_logits_processors(s, progress[row]) ? adjusted : logits) + (i64)index * vocab;
  Distribution d = distribution(group, row_logits, vocab, s);
  int token = -1;
  if (position == count || compares_tokens(s))
    token = sample(group, row_logits, vocab, d, s.seed, TARGET, progress[row].length + position);
  if (group.rank() == 0) {
    distributions[index] = d;
    chosen[index] = token;
  }
}

// Acceptance, by the rule of each row, and commit. The draft's logits of a step lie step_stride apart, those of a row
// draft_stride, and draft_vocab of them count. q [B, draft_len]; target_logits and adjusted [B, draft_len + 1, vocab],
// p and chosen [B, draft_len + 1]; counts [B, vocab], of rows with penalties; records [B, record_len].
// Where the draft failed, the tokens that it drew before are its whole proposal.
ROW_KERNEL void accept(
    i64* tokens, int token_stride, Progress* progress, int draft_len, Sampling* sampling, const Distribution* q,
    const float* draft_logits, int step_stride, int draft_stride, int draft_vocab, const Distribution* p,
    const int* chosen, const float* target_logits, const float* adjusted, int vocab, const i64* stop_ids, u32* counts,
    i64* records, Barrier* barriers) {
  int row = blockIdx.x, first = row * (draft_len + 1);
  ThreadGroup group = group_of(barriers);
  const Sampling& s = sampling[row];
  const Progress before = progress[row];
  i64* row_tokens = tokens + (i64)row * token_stride;
  const i64* drafts = row_tokens + before.length;
  int max_count = draft_count(before, s, draft_len), count = drawn_drafts(drafts, max_count);
  Verdict verdict = {0, -1};  // Of a row that has ended.
  bool decodes = before.remaining > 0;
  if (decodes && compares_tokens(s)) verdict = compare_tokens(drafts, chosen + first, count);
  else if (decodes) {
    const float* logits = (has_logits_processors(s, before) ? adjusted : target_logits) + (i64)first * vocab;
    int last = chosen[first + count];
    if (count < max_count)  // `sample_target` has chosen a token only after max_count draft tokens.
      last = sample(
          group, logits + (i64)count * vocab, vocab, p[first + count], s.seed, TARGET, before.length + count);
    verdict = compare_logits(
        group, drafts, count, q + row * draft_len, draft_logits + (i64)row * draft_stride, step_stride, draft_vocab,
        p + first, logits, vocab, last, s.seed, before.length);
  }
  group.sync();  // Only now may thread 0 change what all threads have read.
  if (group.rank() == 0)
    commit(
        progress + row, sampling + row, row_tokens, stop_ids + row * MAX_STOP_IDS,
        has_penalties(s) ? counts + (i64)row * vocab : nullptr, max_count, count, verdict,
        records + row * record_len(draft_len));
}

// The log-probabilities of the tokens in `records`, by the target's unchanged logits [B, draft_len + 1, vocab]:
// logprobs [B, draft_len + 1, 1 + MAX_LOGPROBS]: the token's, then those of the likeliest ids.
ROW_KERNEL void log_probabilities(
    const float* logits, int vocab, int draft_len, const Sampling* sampling, const i64* records, TokenValue* logprobs,
    Barrier* barriers) {
  int row = blockIdx.x, position = blockIdx.y, index = row * (draft_len + 1) + position;
  if (sampling[row].logprobs < 0) return;
  const i64* record = records + row * record_len(draft_len);
  i64 accepted = record[Record::ACCEPTED];
  i64 token = position < accepted ? record[Record::DRAFTS + position] : record[Record::NEXT_TOKEN];
  if (position > accepted || token < 0) return;
  ThreadGroup group = group_of(barriers);
  const float* row_logits = logits + (i64)index * vocab;
  Sampling plain = {};
  plain.temperature = 1;
  plain.top_p = 1;
  plain.use_logits = 1;
  Distribution d = distribution(group, row_logits, vocab, plain);
  logprobs += (i64)index * (1 + MAX_LOGPROBS);
  if (group.rank() == 0) logprobs[0] = {(int)token, log_probability(d, row_logits[token])};
  likeliest(group, row_logits, vocab, d, sampling[row].logprobs, logprobs + 1);
}

// Append draft tokens of the host: uploads [B, 1 + draft_len], how many of a row and which. They are deterministic, so
// q is 1. One thread per row.
KERNEL void place_drafts(
    const i64* uploads, i64* tokens, int token_stride, const Progress* progress, int draft_len, Sampling* sampling,
    Distribution* q) {
  int row = blockIdx.x;
  const i64* upload = uploads + (i64)row * (1 + draft_len);
  int count = (int)upload[0];
  sampling[row].draft_len = count;
  for (int i = 0; i < count; i++) {
    tokens[(i64)row * token_stride + progress[row].length + i] = upload[1 + i];
    q[row * draft_len + i] = {0, (int)upload[1 + i], 0, 0, 1};
  }
}

// Copy the draft tokens behind each row's text from `tokens` to `packed` [B, draft_len], on the draft's GPU, or back,
// on the target's. One thread per row.
KERNEL void move_drafts(
    i64* tokens, int token_stride, const Progress* progress, int draft_len, i64* packed, int unpacking) {
  i64* drafts = tokens + (i64)blockIdx.x * token_stride + progress[blockIdx.x].length;
  packed += blockIdx.x * draft_len;
  for (int i = 0; i < draft_len; i++) {
    if (unpacking) drafts[i] = packed[i];
    else packed[i] = drafts[i];
  }
}

// Commit on the draft's GPU what the target's committed: the records [B, record_len] of `accept`.
// counts [B, vocab]. One thread per row.
KERNEL void commit_records(
    i64* tokens, int token_stride, Progress* progress, int draft_len, Sampling* sampling, const i64* stop_ids,
    u32* counts, int vocab, i64* records) {
  int row = blockIdx.x;
  const Sampling& s = sampling[row];
  i64* record = records + row * record_len(draft_len);
  Verdict verdict = {(int)record[Record::ACCEPTED], (int)record[Record::NEXT_TOKEN]};
  commit(
      progress + row, sampling + row, tokens + (i64)row * token_stride, stop_ids + row * MAX_STOP_IDS,
      has_penalties(s) ? counts + (i64)row * vocab : nullptr, draft_count(progress[row], s, draft_len),
      (int)record[Record::DRAFTED], verdict, record);
}

// do(unit, count): this thread's share of `bytes`, in units of 16 bytes where all addresses are multiples of them.
template <typename Wide, typename Narrow>
FUNCTION void each_unit(u64 addresses, i64 bytes, Wide wide, Narrow narrow) {
  bool aligned = (addresses | bytes) % sizeof(Four) == 0;
  i64 count = bytes / (aligned ? sizeof(Four) : sizeof(u16)), step = (i64)gridDim.x * blockDim.x;
  for (i64 unit = (i64)blockIdx.x * blockDim.x + threadIdx.x; unit < count; unit += step) {
    if (aligned) wide(unit);
    else narrow(unit);
  }
}

template <typename Unit>
FUNCTION void exchange(void* array, void* other, i64 unit) {
  Unit before = ((Unit*)array)[unit];
  ((Unit*)array)[unit] = ((Unit*)other)[unit];
  ((Unit*)other)[unit] = before;
}

FUNCTION void swap_bytes(void* array, void* other, i64 bytes) {
  each_unit((u64)array | (u64)other, bytes, [=](i64 unit) { exchange<Four>(array, other, unit); },
            [=](i64 unit) { exchange<u16>(array, other, unit); });
}

FUNCTION void copy_bytes(void* to, const void* from, i64 bytes) {
  each_unit((u64)to | (u64)from, bytes, [=](i64 unit) { ((Four*)to)[unit] = ((const Four*)from)[unit]; },
            [=](i64 unit) { ((u16*)to)[unit] = ((const u16*)from)[unit]; });
}

FUNCTION u8* position_of(const CacheTensor& tensor, int length, i64 row, int head, int position) {
  return (u8*)tensor.rows + ((row * tensor.heads + head) * length + position) * tensor.size;
}

// Copy positions start .. of a row, of every tensor (blockIdx.z) and head (blockIdx.y), to `count` blocks of its pool
// or back.
KERNEL void copy_blocks(
    const CacheTensor* tensors, int length, int row, int start, const int* blocks, int count, int saving) {
  const CacheTensor& tensor = tensors[blockIdx.z];
  int head = blockIdx.y;
  if (head >= tensor.heads) return;
  for (int i = 0; i < count; i++) {
    u8* positions = position_of(tensor, length, row, head, start + i * CACHE_BLOCK);
    u8* block = (u8*)tensor.pool + ((i64)blocks[i] * tensor.heads + head) * CACHE_BLOCK * tensor.size;
    copy_bytes(saving ? block : positions, saving ? positions : block, CACHE_BLOCK * tensor.size);
  }
}

// Exchange the first `positions` of two rows, of every tensor (blockIdx.z) and head (blockIdx.y).
KERNEL void swap_rows(const CacheTensor* tensors, int length, int row, int other, int positions) {
  const CacheTensor& tensor = tensors[blockIdx.z];
  int head = blockIdx.y;
  if (head >= tensor.heads) return;
  swap_bytes(
      position_of(tensor, length, row, head, 0), position_of(tensor, length, other, head, 0),
      (i64)positions * tensor.size);
}

// Copy new positions of rows `first` .., [batch, heads, query_len] of every tensor (blockIdx.z) and head (blockIdx.y),
// to the cache.
KERNEL void write_positions(
    const CacheTensor* tensors, int length, int first, const i64* write_indices, int batch, int query_len) {
  const CacheTensor& tensor = tensors[blockIdx.z];
  int head = blockIdx.y;
  if (head >= tensor.heads) return;
  i64 bytes = (i64)query_len * tensor.size;
  for (int row = 0; row < batch; row++) {
    const u8* from = (const u8*)tensor.pool + ((i64)row * tensor.heads + head) * bytes;
    copy_bytes(position_of(tensor, length, first + row, head, (int)write_indices[row]), from, bytes);
  }
}

// Copy the states that a pass has written (`pool`) of each row (blockIdx.y) to rows `first` .., of every tensor
// (blockIdx.z), where the row advances.
KERNEL void take_states(const CacheTensor* tensors, int first, const int* advances) {
  const CacheTensor& tensor = tensors[blockIdx.z];
  int row = blockIdx.y;
  if (!advances[row]) return;
  copy_bytes(position_of(tensor, 1, first + row, 0, 0), (const u8*)tensor.pool + (i64)row * tensor.size, tensor.size);
}

// Exchange two arrays of `bytes`, an even number.
KERNEL void swap(void* array, void* other, int bytes) { swap_bytes(array, other, bytes); }
