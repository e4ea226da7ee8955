// A round's arithmetic on the device: from logits to tokens, from draft tokens to committed ones.
//
// The same formulas as specrun/sampling.py and specrun/acceptance.py, row by row. Functions of one row are written for
// a Team of threads and know nothing of how many there are. The file compiles for CUDA (a Team is a thread block) and
// as host C++ (a Team is one thread), so the arithmetic that runs on a GPU is tested on machines without one.
//
// All reductions are integer maxima and sums, which do not depend on the order of the threads: a row's result is the
// same for every Team size. Masses of probability are summed in fixed point for that reason.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef __CUDACC__
#define FUNCTION __device__ inline
#define KERNEL extern "C" __global__
#define ROW_KERNEL extern "C" __global__ __launch_bounds__(1024)  // As many registers as that many threads may have.
#define SHARED __shared__
#else
#include <cmath>
#include <cstring>
#define FUNCTION inline
#define KERNEL extern "C"
#define ROW_KERNEL extern "C"
#define SHARED static thread_local
struct Index { int x, y; };
static thread_local Index blockIdx;
// What the launch syntax does on the device: the host's caller walks over the grid.
extern "C" void set_block(int x, int y) { blockIdx = {x, y}; }
#endif

// ---------------------------------------------------------------------------------------------------------- threads

// The threads that work on one row together. Every thread of it must reach every call of its functions.
struct Team {
#ifdef __CUDACC__
  FUNCTION int rank() const { return threadIdx.x; }
  FUNCTION int size() const { return blockDim.x; }
  FUNCTION void wait() const { __syncthreads(); }
  FUNCTION void add(u64* sum, u64 value) const { atomicAdd(sum, value); }

  // The result of `combine` over all threads' values, in every thread.
  template <typename Combine>
  FUNCTION u64 reduce(u64 value, Combine combine) const {
    __shared__ u64 warps[32];
    for (int lane = 16; lane > 0; lane /= 2) value = combine(value, __shfl_xor_sync(~0u, value, lane));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    wait();
    u64 total = warps[0];
    for (int warp = 1; warp < (int)blockDim.x / 32; warp++) total = combine(total, warps[warp]);
    wait();  // `warps` is free for the next reduction.
    return total;
  }
#else
  int rank() const { return 0; }
  int size() const { return 1; }
  void wait() const {}
  void add(u64* sum, u64 value) const { *sum += value; }
  template <typename Combine>
  u64 reduce(u64 value, Combine) const { return value; }
#endif
  FUNCTION u64 largest(u64 value) const {
    return reduce(value, [](u64 a, u64 b) { return a > b ? a : b; });
  }
  FUNCTION u64 sum(u64 value) const {
    return reduce(value, [](u64 a, u64 b) { return a + b; });
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

// What random numbers are for; see Purpose in sampling.py.
enum { TARGET = 0, DRAFT = 1, ACCEPT = 2 };

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
FUNCTION float exponential(u32 bits) {
  float u = ((float)bits + 0.5f) * 0x1p-32f;
  return -log1pf(-(u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f));
}

// ---------------------------------------------------------------------------------------------------- distributions

// How a row chooses its tokens; temperature 0 is greedy, top_k 0, top_p 1 and min_p 0 are off. As in rounds/device.py.
struct Sampling {
  u64 seed;
  double top_p;
  float temperature;
  int top_k;
  float min_p;
  int unused;
};

// A row of logits as a distribution: all that is needed to turn one logit into its probability.
struct Distribution {
  float peak;         // The largest logit.
  int best;           // Its id; -1 where the logits are not numbers.
  float temperature;  // 0: all of the mass is at `best`.
  float smallest;     // Weights below this one are cut off.
  float total;        // The sum of the weights that are left.
};

FUNCTION float raw_weight(const Distribution& d, float logit) { return expf((logit - d.peak) / d.temperature); }

FUNCTION float probability(const Distribution& d, float logit) {
  float weight = raw_weight(d, logit);
  return weight >= d.smallest ? weight / d.total : 0.0f;
}

// A weight of at most 1 in fixed point: 2^19 of them have room in 64 bits.
FUNCTION u64 mass(float weight) { return (u64)(weight * 0x1p44f + 0.5f); }

enum Measure { COUNT, MASS };

// The smallest weight that is kept: the smallest v with measure(weights > v) < limit, found byte by byte.
// Only weights of at least d.smallest exist for it. Ties with the last one kept are kept.
FUNCTION float cut(const Team& team, const float* logits, int vocab, const Distribution& d, Measure measure, u64 limit) {
  SHARED u64 bins[256];
  SHARED u64 found[2];  // Chosen byte, and the measure of all that is larger.
  u32 prefix = 0;
  u64 above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = team.rank(); bin < 256; bin += team.size()) bins[bin] = 0;
    team.wait();
    for (int v = team.rank(); v < vocab; v += team.size()) {
      float weight = raw_weight(d, logits[v]);
      u32 bits = float_bits(weight);
      if (weight < d.smallest || (u64)bits >> (shift + 8) != prefix) continue;
      team.add(&bins[bits >> shift & 255], measure == COUNT ? 1 : mass(weight));
    }
    team.wait();
    if (team.rank() == 0) {
      u64 larger = above;
      for (int bin = 255; bin >= 0; bin--) {
        if (!bins[bin]) continue;
        if (larger >= limit) break;
        found[0] = bin;
        found[1] = larger;
        larger += bins[bin];
      }
    }
    team.wait();
    prefix = prefix << 8 | (u32)found[0];
    above = found[1];
    team.wait();
  }
  return bits_float(prefix);
}

FUNCTION u64 kept_mass(const Team& team, const float* logits, int vocab, const Distribution& d) {
  u64 kept = 0;
  for (int v = team.rank(); v < vocab; v += team.size()) {
    float weight = raw_weight(d, logits[v]);
    if (weight >= d.smallest) kept += mass(weight);
  }
  return team.sum(kept);
}

// Temperature, then min-p, top-k, top-p, as `probabilities` in sampling.py.
FUNCTION Distribution distribution(const Team& team, const float* logits, int vocab, const Sampling& s) {
  const u64 not_a_number = ~0ull;
  u64 best = 0;
  for (int v = team.rank(); v < vocab; v += team.size()) {
    u64 candidate = logits[v] < infinity() ? scored(logits[v], v) : not_a_number;
    if (candidate > best) best = candidate;
  }
  best = team.largest(best);
  Distribution d = {scored_value(best), scored_id(best), s.temperature, 0.0f, 1.0f};
  if (best == not_a_number || d.peak == -infinity()) d.best = -1;
  if (d.best < 0 || s.temperature == 0) return d;
  d.smallest = s.min_p;  // The likeliest token's weight is 1.
  d.temperature = fminf(fmaxf(s.temperature, 1e-37f), 1e38f);
  if (s.top_k > 0 && s.top_k < vocab) d.smallest = cut(team, logits, vocab, d, COUNT, s.top_k);
  u64 total = kept_mass(team, logits, vocab, d);
  if (s.top_p < 1) {
    d.smallest = cut(team, logits, vocab, d, MASS, (u64)ceil(s.top_p * (double)total));
    total = kept_mass(team, logits, vocab, d);
  }
  d.total = (float)((double)total * 0x1p-44);
  return d;
}

// argmax of score(v) / E_v over the vocabulary, with the exponentials of (seed, purpose, position): a draw in
// proportion to the scores. -1 where every score is 0.
template <typename Score>
FUNCTION int race(const Team& team, int vocab, u64 seed, u64 purpose, u64 position, Score score) {
  u64 best = 0;
  for (int block = team.rank(); block * 8 < vocab; block += team.size()) {
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
      u64 candidate = scored(scores[i] / exponential((u32)(words.word[i / 2] >> (i % 2 * 32))), first + i);
      if (candidate > best) best = candidate;
    }
  }
  best = team.largest(best);
  return best ? scored_id(best) : -1;
}

// The token a model chooses at `position`; -1 where the logits are not numbers.
FUNCTION int choose(
    const Team& team, const float* logits, int vocab, const Distribution& d, u64 seed, u64 purpose, u64 position) {
  if (d.best < 0 || d.temperature == 0) return d.best;
  return race(team, vocab, seed, purpose, position, [&](int v) { return probability(d, logits[v]); });
}

// ------------------------------------------------------------------------------------------------------- acceptance

// How far a row is. As in rounds/device.py.
struct Progress {
  int length;     // Committed tokens.
  int remaining;  // Tokens that may still be committed; 0: the row has ended.
};

struct Verdict {
  int accepted;   // Draft tokens that stand.
  int following;  // The target's token after them; -1 where logits were not numbers.
};

// The target adds a token of its own, so the last token of a row is never drafted.
FUNCTION int draft_count(const Progress& p, int draft_len) {
  return p.remaining - 1 < draft_len ? (p.remaining > 0 ? p.remaining - 1 : 0) : draft_len;
}

// Draft tokens stand while they are the target's own choice.
FUNCTION Verdict compare_tokens(const i64* drafts, const int* chosen, int count) {
  int accepted = 0;
  while (accepted < count && drafts[accepted] == chosen[accepted]) accepted++;
  return {accepted, chosen[accepted]};
}

// Modified rejection sampling (arXiv 2302.01318, 2211.17192); see accept_logits in acceptance.py.
// p, q: distributions of the target's and the draft's logits at each draft position; draft ids end at draft_vocab.
FUNCTION Verdict compare_logits(
    const Team& team, const i64* drafts, int count, const Distribution* q, const float* draft_logits,
    i64 draft_row, int draft_vocab, const Distribution* p, const float* target_logits, int vocab, u64 seed,
    u64 position) {
  if (p[0].temperature == 0) {
    int accepted = 0;
    while (accepted < count && drafts[accepted] == p[accepted].best) accepted++;
    return {accepted, p[accepted].best};
  }
  for (int i = 0; i < count; i++) {
    const float *target = target_logits + (i64)i * vocab, *draft = draft_logits + i * draft_row;
    i64 token = drafts[i];
    if (p[i].best < 0 || q[i].best < 0) return {i, -1};
    double u = uniform(seed, ACCEPT, position + i);
    if (u * (double)probability(q[i], draft[token]) < (double)probability(p[i], target[token])) continue;
    int following = race(team, vocab, seed, TARGET, position + i, [&](int v) {
      float other = v < draft_vocab ? probability(q[i], draft[v]) : 0.0f;
      return fmaxf(probability(p[i], target[v]) - other, 0.0f);
    });
    // p == q up to rounding leaves nothing over; p is then the remainder's limit.
    if (following < 0) following = choose(team, target, vocab, p[i], seed, TARGET, position + i);
    return {i, following};
  }
  return {count, choose(team, target_logits + (i64)count * vocab, vocab, p[count], seed, TARGET, position + count)};
}

// Append a round's tokens up to a stop id or the row's end, and write down what happened:
// record [3 + draft_len]: drafted, accepted, following, the draft tokens.
FUNCTION void commit(
    Progress* progress, i64* tokens, const i64* stop_ids, int stops, int drafted, const Verdict& verdict, i64* record) {
  Progress p = *progress;
  record[0] = drafted;
  record[1] = verdict.accepted;
  record[2] = verdict.following;
  for (int i = 0; i < drafted; i++) record[3 + i] = tokens[p.length + i];
  if (verdict.following < 0) p.remaining = 0;
  else tokens[p.length + verdict.accepted] = verdict.following;
  for (int i = 0; i <= verdict.accepted && p.remaining > 0; i++) {
    i64 token = tokens[p.length++];
    p.remaining--;
    for (int stop = 0; stop < stops; stop++)
      if (token == stop_ids[stop]) p.remaining = 0;
  }
  *progress = p;
}

// ---------------------------------------------------------------------------------------------------------- kernels
// One block per row (blockIdx.x), and per position where there are several (blockIdx.y).
// tokens [B, width]: committed and draft tokens; progress [B]; sampling [B]; distributions [B, positions].

// An engine's inputs: `count` tokens of each row from progress.length + offset on, written where they stand, and
// `kept` positions whose logits are wanted, the first at progress.length + keep_from. One thread per row.
KERNEL void feed(
    const i64* tokens, int width, const Progress* progress, int offset, int count, int keep_from, int kept, int room,
    int vocab, i64* input_ids, i64* write_indices, i64* logits_indices) {
  int row = blockIdx.x, length = progress[row].length;
  int start = length + offset;
  // A row at its end is fed along with the others; it may write junk behind its tokens, but not behind the cache.
  if (start > room - count) start = room - count;
  if (start < 0) start = 0;
  for (int i = 0; i < count; i++) {
    i64 token = tokens[(i64)row * width + (start + i < width ? start + i : width - 1)];
    // A target with a padded embedding may commit ids that a draft without the padding has no row for; -1 is a draft
    // token that could not be drawn, which acceptance reports.
    input_ids[row * count + i] = token < 0 ? 0 : token < vocab ? token : vocab - 1;
  }
  write_indices[row] = start;
  for (int i = 0; i < kept; i++) {
    int index = length + keep_from + i - start;
    logits_indices[row * kept + i] = index < 0 ? 0 : index < count ? index : count - 1;
  }
}

// Draft token `step` of each row, appended behind the committed ones: logits [B, stride].
ROW_KERNEL void draw_draft(
    const float* logits, int stride, int vocab, const Sampling* sampling, const Progress* progress, int step,
    int draft_len, int purpose, i64* tokens, int width, Distribution* distributions) {
  int row = blockIdx.x;
  Team team;
  if (step >= draft_count(progress[row], draft_len)) return;
  const float* own = logits + (i64)row * stride;
  Distribution d = distribution(team, own, vocab, sampling[row]);
  int position = progress[row].length + step;
  int token = choose(team, own, vocab, d, sampling[row].seed, purpose, position);
  if (team.rank() == 0) {
    distributions[row * draft_len + step] = d;
    tokens[(i64)row * width + position] = token;  // -1 is no token: acceptance reports it.
  }
}

// The target's own choice at every position: logits [B, draft_len + 1, vocab] -> chosen [B, draft_len + 1].
ROW_KERNEL void choose_target(
    const float* logits, int vocab, const Sampling* sampling, const Progress* progress, int draft_len, int* chosen) {
  int row = blockIdx.x, position = blockIdx.y, place = row * (draft_len + 1) + position;
  Team team;
  if (progress[row].remaining == 0 || position > draft_count(progress[row], draft_len)) return;
  const float* own = logits + (i64)place * vocab;
  Distribution d = distribution(team, own, vocab, sampling[row]);
  int token = choose(team, own, vocab, d, sampling[row].seed, TARGET, progress[row].length + position);
  if (team.rank() == 0) chosen[place] = token;
}

// The target's distribution at every position: logits [B, draft_len + 1, vocab] -> [B, draft_len + 1].
ROW_KERNEL void describe_target(
    const float* logits, int vocab, const Sampling* sampling, const Progress* progress, int draft_len,
    Distribution* distributions) {
  int row = blockIdx.x, position = blockIdx.y, place = row * (draft_len + 1) + position;
  Team team;
  if (progress[row].remaining == 0 || position > draft_count(progress[row], draft_len)) return;
  Distribution d = distribution(team, logits + (i64)place * vocab, vocab, sampling[row]);
  if (team.rank() == 0) distributions[place] = d;
}

FUNCTION bool has_ended(const Progress& progress, i64* record) {
  if (progress.remaining > 0) return false;
  record[0] = record[1] = 0;
  record[2] = 0;
  return true;
}

FUNCTION bool all_drawn(const i64* drafts, int count) {
  for (int i = 0; i < count; i++)
    if (drafts[i] < 0) return false;
  return true;
}

// Token acceptance and commit. One thread per row. stop_ids [B, stops]; records [B, 3 + draft_len].
KERNEL void accept_tokens(
    i64* tokens, int width, Progress* progress, int draft_len, const int* chosen, const i64* stop_ids, int stops,
    i64* records) {
  int row = blockIdx.x;
  i64 *own = tokens + (i64)row * width, *record = records + row * (3 + draft_len);
  if (has_ended(progress[row], record)) return;
  int count = draft_count(progress[row], draft_len);
  const i64* drafts = own + progress[row].length;
  Verdict verdict = {0, -1};
  if (all_drawn(drafts, count)) verdict = compare_tokens(drafts, chosen + row * (draft_len + 1), count);
  commit(progress + row, own, stop_ids + row * stops, stops, count, verdict, record);
}

// Modified rejection sampling and commit. The draft's logits of a step lie step_stride apart, those of a row
// draft_stride, and draft_vocab of them count. q [B, draft_len];
// target_logits [B, draft_len + 1, vocab], p [B, draft_len + 1].
ROW_KERNEL void accept_logits(
    i64* tokens, int width, Progress* progress, int draft_len, const Distribution* q, const float* draft_logits,
    int step_stride, int draft_stride, int draft_vocab, const Distribution* p, const float* target_logits, int vocab,
    const Sampling* sampling, const i64* stop_ids, int stops, i64* records) {
  int row = blockIdx.x;
  Team team;
  i64 *own = tokens + (i64)row * width, *record = records + row * (3 + draft_len);
  int length = progress[row].length;
  int count = draft_count(progress[row], draft_len);
  bool ended = progress[row].remaining == 0;
  team.wait();  // Thread 0 changes `progress` below.
  if (ended) {
    if (team.rank() == 0) has_ended(progress[row], record);
    return;
  }
  Verdict verdict = {0, -1};
  if (all_drawn(own + length, count))
    verdict = compare_logits(
        team, own + length, count, q + row * draft_len, draft_logits + (i64)row * draft_stride,
        step_stride, draft_vocab, p + row * (draft_len + 1),
        target_logits + (i64)row * (draft_len + 1) * vocab, vocab, sampling[row].seed, length);
  team.wait();
  if (team.rank() == 0) commit(progress + row, own, stop_ids + row * stops, stops, count, verdict, record);
}
