// Mixtures of experts: the router's product is `logits_*`; here are the choice of experts and their products.
//
// A pair is a token and one of its experts: pair token * chosen + slot, slots in the order of scores.
// A pair's numbers do not depend on the other pairs of its expert, and a token adds up its pairs in the order of slots.

// Choose the `chosen` experts of each token with the highest scores [tokens, experts]; of equal ones the first. Their
// shares are a softmax over the chosen ones (`is_normalized`) or over all; NaN where a score is no finite number. The
// chosen experts always differ, so a pass has no more pairs of an expert than tokens. A block has a token.
KERNEL(32)
choose_experts(const f32* all_scores, int experts, int chosen, int is_normalized, int* choices, f32* shares) {
  __shared__ f32 best[32];
  __shared__ int best_expert[32];
  const f32* scores = all_scores + (i64)blockIdx.x * experts;
  int lane = threadIdx.x;
  i64 pair = (i64)blockIdx.x * chosen;
  f32 zero = 0;
  for (int e = lane; e < experts; e += 32) zero += scores[e] * 0;
  zero = sum_of<32>(zero);
  if (zero != 0) {
    for (int slot = lane; slot < chosen; slot += 32) choices[pair + slot] = slot, shares[pair + slot] = zero;
    return;
  }
  f32 last = -NOTHING, top = 0, total = 0;  // The score that was chosen before, the highest one, the sum of weights.
  int last_expert = -1;
  for (int slot = 0; slot < chosen; slot++) {
    f32 score = NOTHING;
    int expert = experts;
    for (int e = lane; e < experts; e += 32) {
      bool is_left = scores[e] < last || (scores[e] == last && e > last_expert);
      if (is_left && (scores[e] > score || expert == experts)) score = scores[e], expert = e;
    }
    best[lane] = score, best_expert[lane] = expert;
    __syncthreads();
    for (int other = 0; other < 32; other++)
      if (best_expert[other] < experts && (expert == experts || best[other] > score ||
                                           (best[other] == score && best_expert[other] < expert)))
        score = best[other], expert = best_expert[other];
    __syncthreads();
    last = score, last_expert = expert;
    if (slot == 0) top = score;
    f32 weight = exp2_of((score - top) * LOG2_E);
    total += weight;
    if (lane == 0) choices[pair + slot] = expert, shares[pair + slot] = weight;
  }
  if (!is_normalized) {
    total = 0;
    for (int e = lane; e < experts; e += 32) total += exp2_of((scores[e] - top) * LOG2_E);
    total = sum_of<32>(total);
  }
  for (int slot = 0; lane == 0 && slot < chosen; slot++) shares[pair + slot] /= total;
}

// List the pairs of each expert in their order: `lists` [experts, tokens] and `counts`. A block has an expert.
KERNEL(32) list_pairs(const int* choices, int tokens, int chosen, int* lists, int* counts) {
  __shared__ int found[32];
  int lane = threadIdx.x, expert = blockIdx.x, pairs = tokens * chosen, before = 0;
  int first = (i64)pairs * lane / 32, end = (i64)pairs * (lane + 1) / 32, own = 0;
  for (int pair = first; pair < end; pair++) own += choices[pair] == expert;
  found[lane] = own;
  __syncthreads();
  for (int other = 0; other < lane; other++) before += found[other];
  int* list = lists + (i64)expert * tokens + before;
  for (int pair = first; pair < end; pair++)
    if (choices[pair] == expert) *list++ = pair;
  if (lane == 31) counts[expert] = before + own;
}

// What some pairs read: that of the token pair / share, or with a share of 1 the pair's own.
template <class Tokens>
struct Listed {
  Tokens tokens;
  const int* pairs;
  int share;
  FUNCTION u32 pair(i64 at, int slot, int k, int length) const {
    return tokens.pair(pairs[at] / share, slot, k, length);
  }
};

// As `gated`, of the pairs of expert blockIdx.z: gated [pairs, outputs]. Rows of the gate and of up may alternate.
#define GATED_PAIRS_PARAMETERS                                                                                  \
  WEIGHT_PARAMETERS, const f32 *bias, const f32 *stream, const f32 *gamma, f32 epsilon, int length, int tokens, \
      int outputs, int activation, int alternate, int chosen, const int *lists, const int *counts, u16 *gated
template <class Format, int GROUPS>
FUNCTION void project_gated_pairs(GATED_PAIRS_PARAMETERS) {
  int expert = blockIdx.z, count = counts[expert];
  if (blockIdx.y * GROUPS * GROUP >= count) return;
  const int* list = lists + (i64)expert * tokens;
  int of_expert = 2 * outputs / TILE * expert, x = blockIdx.x;
  int tiles[2] = {of_expert + (alternate ? 2 * x : x), of_expert + (alternate ? 2 * x + 1 : x + outputs / TILE)};
  Format weight{numbers, scales, units, offsets, length};
  auto token_of = [&](i64 at) { return (i64)(list[at] / chosen); };
  Listed<Normalized> inputs{normalize<GROUPS>(stream, gamma, epsilon, length, count, token_of), list, chosen};
  auto finish = [&](i64 at, int row, const f32* sums) {
    const f32* of_rows = bias + (i64)expert * 2 * outputs;
    f32 gate = sums[0], up = sums[1];
    if (bias) gate += of_rows[alternate ? 2 * row : row], up += of_rows[alternate ? 2 * row + 1 : outputs + row];
    gated[(i64)list[at] * outputs + row] = narrow(activate(gate, up, activation));
  };
  multiply<2, GROUPS>(inputs, weight, tiles, count, finish, alternate);
}

// The products of the pairs of expert blockIdx.z: projected [pairs, outputs].
#define PAIRS_PARAMETERS                                                                           \
  WEIGHT_PARAMETERS, const f32 *bias, const u16 *gated, int length, int tokens, int outputs,       \
      const int *lists, const int *counts, f32 *projected
template <class Format, int GROUPS>
FUNCTION void project_pairs(PAIRS_PARAMETERS) {
  int expert = blockIdx.z, count = counts[expert];
  if (blockIdx.y * GROUPS * GROUP >= count) return;
  const int* list = lists + (i64)expert * tokens;
  int tiles[1] = {outputs / TILE * expert + (int)blockIdx.x};
  Format weight{numbers, scales, units, offsets, length};
  multiply<1, GROUPS>(Listed<Input>{{gated}, list, 1}, weight, tiles, count, [&](i64 at, int row, const f32* sums) {
    projected[(i64)list[at] * outputs + row] = bias ? sums[0] + bias[(i64)expert * outputs + row] : sums[0];
  });
}

// stream += the sum of a token's pairs by their shares.
KERNEL(128) add_pairs(const f32* projected, const f32* shares, int chosen, int width, f32* stream) {
  i64 pair = (i64)blockIdx.x * chosen;
  for (int k = threadIdx.x; k < width; k += blockDim.x) {
    f32 sum = 0;
    for (int slot = 0; slot < chosen; slot++) sum += shares[pair + slot] * projected[(pair + slot) * width + k];
    stream[(i64)blockIdx.x * width + k] += sum;
  }
}

#define EXPERTS(form)                                                                                             \
  PRODUCT(gated_pairs, form, GATED_PAIRS_PARAMETERS, numbers, scales, units, offsets, bias, stream, gamma,        \
          epsilon, length, tokens, outputs, activation, alternate, chosen, lists, counts, gated)                  \
  PRODUCT(pairs, form, PAIRS_PARAMETERS, numbers, scales, units, offsets, bias, gated, length, tokens, outputs,   \
          lists, counts, projected)
