// The layers of a decoder: five kernels a layer, without experts, each weight read once for all tokens of a pass.
//
// A pass is a list of tokens; `rows` and `positions` say where each stands in the cache. The residual stream is
// float32, as sums are. What products multiply is in 16 bits, and so are keys and values.
//
// The numbers of a token do not depend on the tokens beside it: every sum has one order, which the shape of the model
// decides. That is why texts with drafts, in batches and behind a prefix cache are those of the target alone, to the
// bit. A change here keeps that rule. Sizes of blocks were chosen by arithmetic: no GPU has timed them yet.
//
// HEAD_DIM and BFLOAT16 (1, or 0: float16) are defined in front of this file. Behind it stands which formats of weights
// there are kernels for: Weight_F, PRODUCTS(F) and EMBEDDING(F) of each format F, see kernels.py.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef float f32;

#define FUNCTION __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)

// ---------------------------------------------------------------------------------------------------------- numbers


FUNCTION u16 narrow(f32 value) {
  u16 bits;
#if BFLOAT16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
  return bits;
}

FUNCTION f32 widen_half(u16 bits) {
  f32 value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

FUNCTION f32 widen(u16 bits) {
#if BFLOAT16
  return __uint_as_float((u32)bits << 16);
#else
  return widen_half(bits);
#endif
}

FUNCTION u32 narrow_pair(f32 low, f32 high) { return (u32)narrow(low) | (u32)narrow(high) << 16; }

#if BFLOAT16
constexpr u32 ONE_PAIR = 0x3f803f80;
#else
constexpr u32 ONE_PAIR = 0x3c003c00;
#endif

FUNCTION f32 exp2_of(f32 value) {
  f32 result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

constexpr f32 LOG2_E = 1.4426950408889634f;
#define NOTHING __int_as_float(0xff800000)  // Less than every score.

FUNCTION f32 tanh_of(f32 value) { return 1 - 2 / (exp2_of(2 * LOG2_E * value) + 1); }

// What a gate makes of `up`, as `ACTIVATIONS` in layers.py numbers it.
FUNCTION f32 activate(f32 gate, f32 up, int kind) {
  if (kind == 0) return gate / (1 + exp2_of(-LOG2_E * gate)) * up;  // SiLU
  if (kind == 1)                                                    // GELU by tanh
    return 0.5f * gate * (1 + tanh_of(0.7978845608028654f * (gate + 0.044715f * gate * gate * gate))) * up;
  f32 bounded = fminf(gate, 7);  // gpt-oss
  return (fminf(fmaxf(up, -7), 7) + 1) * (bounded / (1 + exp2_of(-1.702f * LOG2_E * bounded)));
}

FUNCTION f32 soften(f32 value, f32 cap) { return cap > 0 ? cap * tanh_of(value / cap) : value; }

// Over the lanes of a warp, or of the aligned 4 of them.
template <int LANES>
FUNCTION f32 sum_of(f32 value) {
  for (int other = LANES / 2; other > 0; other /= 2) value += __shfl_xor_sync(~0u, value, other);
  return value;
}

FUNCTION f32 largest_of_4(f32 value) {
  for (int other = 2; other > 0; other /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, other));
  return value;
}

// sums[16, 8] += a[16, 16] b[16, 8]. Of lane 4 g + t: a has rows g and g + 8, columns 2 t, 2 t + 1 and 8 further; b has
// column g, rows likewise; sums has rows g (0, 1) and g + 8 (2, 3), columns 2 t, 2 t + 1.
FUNCTION void multiply_tile(f32 (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BFLOAT16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Whether this block is the last of `count` that come here; each of its threads then sees what the others have written.
// The counter is 0 before and behind.
FUNCTION bool is_last(u32* counter, u32 count) {
  __shared__ u32 arrived;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicAdd(counter, 1u);
  __syncthreads();
  if (arrived + 1 < count) return false;
  __threadfence();
  if (threadIdx.x == 0) *counter = 0;
  return true;
}

// ---------------------------------------------------------------------------------------------------------- weights

constexpr int TILE = 16;  // Rows and columns of a tile of a weight.

// A weight [N, K] in tiles of 16 rows: numbers in 16 bits, or codes in 8 or 4. A lane reads 16 bytes at a time: its
// numbers of 1, 2 or 4 tiles, in the order of multiply_tile's a. A number is unit * (scale * code + offset), with units
// of rows, and with scales and offsets (float16) of TILES_OF_SCALE tiles. Codes are integers, or with FLOATS e4m3 and
// e2m1: sign, exponent, mantissa.
template <int BITS, int TILES_OF_SCALE, bool OFFSETS, bool FLOATS>
struct Weight {
  static constexpr int STEP = 16 / BITS;  // Tiles in a lane's 16 bytes.
  static constexpr bool IS_SCALED = BITS < 16, HAS_OFFSETS = OFFSETS;
  static constexpr int SCALED = TILES_OF_SCALE, GROUPS = STEP / SCALED;
  const uint4* numbers;
  const u16* scales;   // [N / 16, steps, 8, 2, GROUPS]: of rows g and g + 8.
  const f32* units;    // [N]
  const u16* offsets;  // As scales.
  int columns;         // K

  // What a lane reads of a row of tiles at once.
  struct Part {
    uint4 numbers;
    u16 scales[2 * GROUPS], offsets[2 * GROUPS];
  };

  FUNCTION int steps() const { return (columns + STEP * TILE - 1) / (STEP * TILE); }

  FUNCTION Part read(int tile, int step) const {
    int lane = threadIdx.x % 32;
    i64 at = (i64)tile * steps() + step;
    Part part;
    part.numbers = __ldcs(numbers + at * 32 + lane);
    if constexpr (IS_SCALED) {
      read_scales(scales + (at * 8 + lane / 4) * 2 * GROUPS, part.scales);
      if constexpr (OFFSETS) read_scales(offsets + (at * 8 + lane / 4) * 2 * GROUPS, part.offsets);
    }
    return part;
  }

  FUNCTION static void read_scales(const u16* from, u16 (&to)[2 * GROUPS]) {
    for (int i = 0; i < GROUPS; i++) {
      u32 two = ((const u32*)from)[i];
      to[2 * i] = two & 0xffff, to[2 * i + 1] = two >> 16;
    }
  }

  // The numbers or codes of one of the tiles.
  FUNCTION static void decode(const Part& part, int tile, u32 (&a)[4]) {
    const u32 words[4] = {part.numbers.x, part.numbers.y, part.numbers.z, part.numbers.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (BITS == 16) a[i] = words[i];
      if constexpr (BITS == 8) {
        u32 word = words[2 * tile + i / 2] >> 16 * (i % 2);
        if constexpr (FLOATS) a[i] = decode_floats((word & 0xff) | (word & 0xff00) << 8);
        else a[i] = narrow_pair((f32)(signed char)(word & 0xff), (f32)(signed char)(word >> 8 & 0xff));
      }
      if constexpr (BITS == 4) {
        u32 codes = words[tile] >> 4 * i & 0x000f000f;
        a[i] = FLOATS ? decode_floats(codes) : decode_integers(codes);
      }
    }
  }

  // Two floats of 8 or 4 bits, 16 bits apart. With their exponent and mantissa in those of a 16-bit float they are too
  // small by a power of two, the subnormal ones too.
  FUNCTION static u32 decode_floats(u32 codes) {
    constexpr int MANTISSA = BITS == 8 ? 3 : 1, BIAS = BITS == 8 ? 7 : 1;
    constexpr int FRACTION = BFLOAT16 ? 7 : 10, WIDE_BIAS = BFLOAT16 ? 127 : 15;  // Of the 16-bit float.
    constexpr u32 SIGN = 1u << (BITS - 1), PAIR = 0x10001, POWER = (u32)(2 * WIDE_BIAS - BIAS) << FRACTION;
    u32 small = (codes & SIGN * PAIR) << (16 - BITS) | (codes & (SIGN - 1) * PAIR) << (FRACTION - MANTISSA), result;
#if BFLOAT16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(small), "r"(POWER * PAIR), "r"(0u));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(small), "r"(POWER * PAIR), "r"(0u));
#endif
    return result;
  }

  // Two codes of 0 to 15, less 8: as the lowest bits of a number that has a place for them.
  FUNCTION static u32 decode_integers(u32 codes) {
    u32 result;
#if BFLOAT16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(codes | 0x43004300u), "r"(0x3f803f80u), "r"(0xc308c308u));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(codes | 0x64006400u), "r"(0x3c003c00u), "r"(0xe408e408u));
#endif
    return result;
  }

  // Number k of row n.
  FUNCTION f32 at(i64 n, int k) const {
    int tile = k / TILE % STEP, lane = n % 8 * 4 + k % 8 / 2, half = n % TILE / 8, i = k % TILE / 8 * 2 + half;
    i64 step = n / TILE * steps() + k / (STEP * TILE), from = step * 32 + lane;
    if constexpr (BITS == 16) return widen(((const u16*)numbers)[from * 8 + 2 * i + k % 2]);
    u32 code = BITS == 8 ? ((const unsigned char*)numbers)[from * 16 + tile * 8 + 2 * i + k % 2]
                         : ((const u32*)numbers)[from * 4 + tile] >> (4 * i + k % 2 * 16) & 15;
    f32 number = FLOATS ? widen((u16)decode_floats(code)) : BITS == 8 ? (signed char)code : (int)code - 8;
    i64 group = ((step * 8 + n % 8) * 2 + half) * GROUPS + tile / SCALED;
    return units[n] * (widen_half(scales[group]) * number + (OFFSETS ? widen_half(offsets[group]) : 0));
  }
};

#define WEIGHT_PARAMETERS const uint4 *numbers, const u16 *scales, const f32 *units, const u16 *offsets

// --------------------------------------------------------------------------------------------------------- products

constexpr int WARPS = 8;
constexpr int GROUP = 8;  // Tokens of a tile.

// Tokens whose norm a product computes: x[token, k] * gamma[k] / rms(x[token]).
struct Normalized {
  const f32* x;
  const f32* gamma;  // Null: x as it is.
  f32 epsilon;
  const f32* scales;  // [tokens of the block], shared.

  // Two neighbouring numbers of a token, in 16 bits. slot: the token's number in its block.
  FUNCTION u32 pair(i64 token, int slot, int k, int length) const {
    const f32* at = x + token * length + k;
    if (!gamma) return narrow_pair(at[0], at[1]);
    f32 scale = scales[slot];
    return narrow_pair(at[0] * scale * gamma[k], at[1] * scale * gamma[k + 1]);
  }
};

struct Input {
  const u16* x;
  FUNCTION u32 pair(i64 token, int slot, int k, int length) const { return *(const u32*)(x + token * length + k); }
};

FUNCTION f32 reciprocal_rms(f32 squares, int count, f32 epsilon) { return 1 / sqrtf(squares / count + epsilon); }

// The sum of the squares of number(0 .. length), by a warp.
template <class Number>
FUNCTION f32 squares_of(Number number, int length) {
  f32 squares = 0;
  for (int k = threadIdx.x % 32; k < length; k += 32) squares += number(k) * number(k);
  return sum_of<32>(squares);
}

// Sums of TILES tiles of 16 rows by GROUPS * 8 tokens. Each warp has every eighth step of a row; `at` adds those up.
template <class Format, int TILES, int GROUPS>
struct Sums {
  f32 (*parts)[GROUPS * GROUP][TILES * TILE];

  template <class Tokens>
  FUNCTION void compute(const Tokens& x, const Format& weight, const int (&tiles)[TILES], int first, int tokens) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, length = weight.columns;
    f32 sums[TILES][GROUPS][4] = {};
#pragma unroll 4  // So many loads are under way.
    for (int step = warp; step < weight.steps(); step += WARPS) {
      typename Format::Part parts[TILES];
#pragma unroll
      for (int i = 0; i < TILES; i++) parts[i] = weight.read(tiles[i], step);
#pragma unroll
      for (int begin = 0; begin < Format::STEP; begin += Format::SCALED)
        add_group(x, parts, step, begin, first, tokens, length, sums);
    }
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          this->parts[warp][group * GROUP + 2 * t + j % 2][i * TILE + g + j / 2 * 8] = sums[i][group][j];
    __syncthreads();
  }

  // Add the products of the tiles of a step that share a scale, from `begin` on: of codes first, then scaled.
  template <class Tokens>
  FUNCTION static void add_group(const Tokens& x, const typename Format::Part (&parts)[TILES], int step, int begin,
                                 int first, int tokens, int length, f32 (&sums)[TILES][GROUPS][4]) {
    constexpr bool IS_SCALED = Format::IS_SCALED;
    constexpr int COUNT = Format::SCALED;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 a[COUNT][TILES][4];
#pragma unroll
    for (int tile = 0; tile < COUNT; tile++)
#pragma unroll
      for (int i = 0; i < TILES; i++) Format::decode(parts[i], begin + tile, a[tile][i]);
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      if (first + group * GROUP >= tokens) break;
      int slot = group * GROUP + g;
      f32 codes[TILES][4] = {}, ones[4] = {};
#pragma unroll
      for (int tile = 0; tile < COUNT; tile++) {
        int k = (step * Format::STEP + begin + tile) * TILE + 2 * t;
        bool is_there = first + slot < tokens && (!IS_SCALED || k < length);
        u32 b0 = is_there ? x.pair(first + slot, slot, k, length) : 0;
        u32 b1 = is_there ? x.pair(first + slot, slot, k + 8, length) : 0;
#pragma unroll
        for (int i = 0; i < TILES; i++) multiply_tile(IS_SCALED ? codes[i] : sums[i][group], a[tile][i], b0, b1);
        if constexpr (Format::HAS_OFFSETS) multiply_tile(ones, {ONE_PAIR, ONE_PAIR, ONE_PAIR, ONE_PAIR}, b0, b1);
      }
      if constexpr (IS_SCALED) {
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            int at = j / 2 * Format::GROUPS + begin / COUNT;
            sums[i][group][j] += widen_half(parts[i].scales[at]) * codes[i][j];
            if constexpr (Format::HAS_OFFSETS) sums[i][group][j] += widen_half(parts[i].offsets[at]) * ones[j];
          }
      }
    }
  }

  // Of a row of each of the tiles, or with `alternate` of TILES rows side by side.
  FUNCTION void at(const Format& weight, const int (&tiles)[TILES], int token, int row, bool alternate,
                   f32 (&sums)[TILES]) const {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      int from = alternate ? row * TILES + i : i * TILE + row;
      sums[i] = 0;
      for (int warp = 0; warp < WARPS; warp++) sums[i] += parts[warp][token][from];
      if constexpr (Format::IS_SCALED) sums[i] *= weight.units[tiles[from / TILE] * TILE + from % TILE];
    }
  }
};

// A block has 16 rows of the weight (of each of TILES matrices) and GROUPS * 8 tokens. One thread calls
// finish(token, row, sums) of each token and row.
template <int TILES, int GROUPS, class Tokens, class Format, class Finish>
FUNCTION void multiply(const Tokens& x, const Format& weight, const int (&tiles)[TILES], int tokens, Finish finish,
                       bool alternate = false) {
  __shared__ f32 parts[WARPS][GROUPS * GROUP][TILES * TILE];
  Sums<Format, TILES, GROUPS> sums{parts};
  int first = blockIdx.y * GROUPS * GROUP;
  sums.compute(x, weight, tiles, first, tokens);
  for (int i = threadIdx.x; i < GROUPS * GROUP * TILE && first + i / TILE < tokens; i += WARPS * 32) {
    f32 totals[TILES];
    sums.at(weight, tiles, i / TILE, i % TILE, alternate, totals);
    finish((i64)first + i / TILE, blockIdx.x * TILE + i % TILE, totals);
  }
}

// token_of: the tokens of the grid, whose number they are in x.
template <int GROUPS, class TokenOf>
FUNCTION Normalized normalize(const f32* x, const f32* gamma, f32 epsilon, int length, int tokens, TokenOf token_of) {
  __shared__ f32 scales[GROUPS * GROUP];
  int first = blockIdx.y * GROUPS * GROUP;
  for (int slot = threadIdx.x / 32; gamma && slot < GROUPS * GROUP && first + slot < tokens; slot += WARPS) {
    const f32* token = x + token_of(first + slot) * length;
    f32 squares = squares_of([&](int k) { return token[k]; }, length);
    if (threadIdx.x % 32 == 0) scales[slot] = reciprocal_rms(squares, length, epsilon);
  }
  __syncthreads();
  return {x, gamma, epsilon, scales};
}

template <int GROUPS>
FUNCTION Normalized normalize(const f32* x, const f32* gamma, f32 epsilon, int length, int tokens) {
  return normalize<GROUPS>(x, gamma, epsilon, length, tokens, [](i64 token) { return token; });
}

struct Rotation {
  const f32* cos;  // [positions, rotated / 2]
  const f32* sin;
  int rotated;  // Numbers of a head that are rotated; 0: none.
  int interleaved;

  // Number i of a head, of which `number(i)` gives those before.
  template <class Number>
  FUNCTION f32 apply(Number number, int i, int position) const {
    int half = rotated / 2;
    if (i >= rotated) return number(i);
    bool is_second = interleaved ? i % 2 : i >= half;
    int pair = interleaved ? i / 2 : i % half, other = interleaved ? i ^ 1 : is_second ? i - half : i + half;
    f32 c = cos[(i64)position * half + pair], s = sin[(i64)position * half + pair];
    return is_second ? number(i) * c + number(other) * s : number(i) * c - number(other) * s;
  }
};

// Queries, keys and values of normalized tokens. The last block of a head normalizes and rotates it, and writes queries
// to `queries` [tokens, heads, HEAD_DIM], keys and values to the caches [rows, kv_heads, cache_length, HEAD_DIM].
#define HEADS_PARAMETERS                                                                                              \
  WEIGHT_PARAMETERS, const f32 *bias, const f32 *stream, const f32 *gamma, f32 epsilon, int length, int tokens,       \
      int heads, int kv_heads, const f32 *query_gamma, const f32 *key_gamma, f32 head_epsilon, const f32 *cos,        \
      const f32 *sin, int rotated, int interleaved, const int *rows, const int *positions, int cache_length,          \
      f32 *projected, u32 *counters, u16 *queries, u16 *keys, u16 *values
template <class Format, int GROUPS>
FUNCTION void project_heads(HEADS_PARAMETERS) {
  int outputs = (heads + 2 * kv_heads) * HEAD_DIM, tiles[1] = {(int)blockIdx.x};
  Format weight{numbers, scales, units, offsets, length};
  Normalized x = normalize<GROUPS>(stream, gamma, epsilon, length, tokens);
  multiply<1, GROUPS>(x, weight, tiles, tokens, [&](i64 token, int row, const f32* sums) {
    projected[token * outputs + row] = bias ? sums[0] + bias[row] : sums[0];
  });
  int head = blockIdx.x * TILE / HEAD_DIM;
  if (!is_last(counters + blockIdx.y * (heads + 2 * kv_heads) + head, HEAD_DIM / TILE)) return;
  bool is_query = head < heads, is_key = !is_query && head < heads + kv_heads;
  const f32* head_gamma = is_query ? query_gamma : is_key ? key_gamma : nullptr;
  Rotation rotation{cos, sin, is_query || is_key ? rotated : 0, interleaved};
  int first = blockIdx.y * GROUPS * GROUP;
  for (int slot = threadIdx.x / 32; slot < GROUPS * GROUP && first + slot < tokens; slot += WARPS) {
    i64 token = first + slot;
    const f32* written = projected + token * outputs + head * HEAD_DIM;
    auto plain = [&](int i) { return __ldcg(written + i); };  // Other blocks wrote some: bypass this one's cache.
    f32 scale = head_gamma ? reciprocal_rms(squares_of(plain, HEAD_DIM), HEAD_DIM, head_epsilon) : 1;
    auto number = [&](int i) { return head_gamma ? plain(i) * scale * head_gamma[i] : plain(i); };
    int cache_head = is_key ? head - heads : head - heads - kv_heads, position = positions[token];
    u16* to = is_query ? queries + (token * heads + head) * HEAD_DIM
                       : (is_key ? keys : values) +
                             (((i64)rows[token] * kv_heads + cache_head) * cache_length + position) * HEAD_DIM;
    for (int i = threadIdx.x % 32; i < HEAD_DIM; i += 32) to[i] = narrow(rotation.apply(number, i, position));
  }
}

// act(gate) * up of normalized tokens, in 16 bits: the weight has the gate's `outputs` rows and then those of up.
#define GATED_PARAMETERS                                                                                             \
  WEIGHT_PARAMETERS, const f32 *stream, const f32 *gamma, f32 epsilon, int length, int tokens, int outputs,          \
      int activation, u16 *gated
template <class Format, int GROUPS>
FUNCTION void project_gated(GATED_PARAMETERS) {
  int tiles[2] = {(int)blockIdx.x, (int)blockIdx.x + outputs / TILE};
  Format weight{numbers, scales, units, offsets, length};
  Normalized x = normalize<GROUPS>(stream, gamma, epsilon, length, tokens);
  multiply<2, GROUPS>(x, weight, tiles, tokens, [&](i64 token, int row, const f32* sums) {
    gated[token * outputs + row] = narrow(activate(sums[0], sums[1], activation));
  });
}

// A product that is added to the residual stream; or, where a norm comes first, written to `to`.
#define ADDED_PARAMETERS                                                                             \
  WEIGHT_PARAMETERS, const f32 *bias, const u16 *input, int length, int tokens, int outputs,         \
      const f32 *residual, f32 *to
template <class Format, int GROUPS>
FUNCTION void project_added(ADDED_PARAMETERS) {
  int tiles[1] = {(int)blockIdx.x};
  Format weight{numbers, scales, units, offsets, length};
  multiply<1, GROUPS>(Input{input}, weight, tiles, tokens, [&](i64 token, int row, const f32* sums) {
    f32 sum = bias ? sums[0] + bias[row] : sums[0];
    i64 at = token * outputs + row;
    to[at] = residual ? residual[at] + sum : sum;
  });
}

// A product of normalized tokens in float32, [tokens, outputs], with `cap` > 0 between -cap and cap.
#define LOGITS_PARAMETERS                                                                                             \
  WEIGHT_PARAMETERS, const f32 *bias, const f32 *stream, const f32 *gamma, f32 epsilon, int length, int tokens,       \
      int outputs, f32 cap, f32 *logits
template <class Format, int GROUPS>
FUNCTION void project_logits(LOGITS_PARAMETERS) {
  int tiles[1] = {(int)blockIdx.x};
  Format weight{numbers, scales, units, offsets, length};
  Normalized x = normalize<GROUPS>(stream, gamma, epsilon, length, tokens);
  multiply<1, GROUPS>(x, weight, tiles, tokens, [&](i64 token, int row, const f32* sums) {
    if (row < outputs) logits[token * outputs + row] = soften(bias ? sums[0] + bias[row] : sums[0], cap);
  });
}

// A kernel for passes of up to 8 tokens, and one for more, in blocks of 32: their sums have the same order.
#define PRODUCT(name, form, parameters, ...)                                                                   \
  KERNEL(WARPS * 32) name##_8_##form(parameters) { project_##name<Weight_##form, 1>(__VA_ARGS__); }           \
  KERNEL(WARPS * 32) name##_32_##form(parameters) { project_##name<Weight_##form, 4>(__VA_ARGS__); }
#define PRODUCTS(form)                                                                                         \
  PRODUCT(heads, form, HEADS_PARAMETERS, numbers, scales, units, offsets, bias, stream, gamma, epsilon,       \
          length, tokens, heads, kv_heads, query_gamma, key_gamma, head_epsilon, cos, sin, rotated, interleaved, \
          rows, positions, cache_length, projected, counters, queries, keys, values)                          \
  PRODUCT(gated, form, GATED_PARAMETERS, numbers, scales, units, offsets, stream, gamma, epsilon, length,     \
          tokens, outputs, activation, gated)                                                                 \
  PRODUCT(added, form, ADDED_PARAMETERS, numbers, scales, units, offsets, bias, input, length, tokens,        \
          outputs, residual, to)                                                                              \
  PRODUCT(logits, form, LOGITS_PARAMETERS, numbers, scales, units, offsets, bias, stream, gamma, epsilon,     \
          length, tokens, outputs, cap, logits)

// -------------------------------------------------------------------------------------------------------- attention

constexpr int ATTENDING_WARPS = 4;
constexpr int SPAN = 32;                       // Positions of a warp.
constexpr int CHUNK = ATTENDING_WARPS * SPAN;  // Positions of a block; kernels.py has the same number.
constexpr int QUERIES = 16;                    // Queries of a block: tokens and heads that share keys.

// Attention of 16 queries over some positions: of each lane 4 numbers of every 16 of a head, in two rows.
struct Attended {
  static constexpr int TILES = HEAD_DIM / 8, SIZE = TILES * 4 + 4;
  f32 sums[TILES][4] = {};
  f32 top[2] = {NOTHING, NOTHING};  // The largest score, times log2(e).
  f32 total[2] = {};                // Of the weights, relative to the largest.

  FUNCTION void save(f32* to) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int j = 0; j < 4; j++) to[(tile * 4 + j) * 32 + lane] = sums[tile][j];
    for (int row = 0; row < 2; row++) {
      to[(TILES * 4 + row) * 32 + lane] = top[row];
      to[(TILES * 4 + 2 + row) * 32 + lane] = total[row];
    }
  }

  // Numbers that another block has saved are read past this multiprocessor's cache.
  FUNCTION static Attended load(const f32* from, bool is_of_another_block) {
    int lane = threadIdx.x % 32;
    Attended result;
    auto at = [&](int i) { return is_of_another_block ? __ldcg(from + i * 32 + lane) : from[i * 32 + lane]; };
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int j = 0; j < 4; j++) result.sums[tile][j] = at(tile * 4 + j);
    for (int row = 0; row < 2; row++) {
      result.top[row] = at(TILES * 4 + row);
      result.total[row] = at(TILES * 4 + 2 + row);
    }
    return result;
  }

  // Add the attention over later positions. Where a row sees none of them, nothing changes.
  FUNCTION void add(const Attended& other) {
    for (int row = 0; row < 2; row++) {
      f32 largest = fmaxf(top[row], other.top[row]), base = largest == NOTHING ? 0 : largest;
      f32 factor = exp2_of(top[row] - base), other_factor = exp2_of(other.top[row] - base);
      total[row] = total[row] * factor + other.total[row] * other_factor;
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int j = 2 * row; j < 2 * row + 2; j++)
          sums[tile][j] = sums[tile][j] * factor + other.sums[tile][j] * other_factor;
      top[row] = largest;
    }
  }
};

// The queries of a block, and what they see of a row's keys and values.
struct Attention {
  const u16* keys;  // [cache_length, HEAD_DIM] of one head of a row.
  const u16* values;
  int last;         // The last position that is written.
  int position[2];  // Of this lane's queries, in rows g and g + 8; -1: there is none.
  int window;       // Positions that a query sees, itself included; 0: all up to its own.
  int first_key;    // Positions before it are seen by queries before it alone.
  f32 scale, cap;
  u32 query[HEAD_DIM / 16][4];

  FUNCTION bool sees(int row, int at) const {
    return at <= position[row] && (!window || at > position[row] - window) &&
           (at >= first_key || position[row] < first_key);
  }

  // Positions first .. first + SPAN, by a warp. Columns of a tile of 16 numbers of a head are in another order than in
  // memory, the same for queries and keys, so that a lane's lie side by side.
  FUNCTION Attended over(int first) const {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Attended result;
    for (int start = first; start < first + SPAN && start <= last; start += 16) {
      f32 scores[2][4] = {};
#pragma unroll
      for (int side = 0; side < 2; side++) {
        int at = start + side * 8 + g;
        const u16* key = keys + (i64)at * HEAD_DIM + 4 * t;
#pragma unroll
        for (int tile = 0; tile < HEAD_DIM / 16; tile++) {
          uint2 b = at <= last ? *(const uint2*)(key + tile * 16) : uint2{0, 0};
          multiply_tile(scores[side], query[tile], b.x, b.y);
        }
      }
      u32 weights[4];
#pragma unroll
      for (int row = 0; row < 2; row++) {
        f32 row_scores[4], largest = NOTHING;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          bool is_seen = sees(row, start + i / 2 * 8 + 2 * t + i % 2);
          row_scores[i] = is_seen ? soften(scores[i / 2][2 * row + i % 2] * scale, cap) * LOG2_E : NOTHING;
          largest = fmaxf(largest, row_scores[i]);
        }
        largest = fmaxf(result.top[row], largest_of_4(largest));
        f32 base = largest == NOTHING ? 0 : largest, factor = exp2_of(result.top[row] - base), sum = 0;
        for (int i = 0; i < 4; i++) sum += row_scores[i] = exp2_of(row_scores[i] - base);
        result.total[row] = result.total[row] * factor + sum_of<4>(sum);
        result.top[row] = largest;
#pragma unroll
        for (int tile = 0; tile < Attended::TILES; tile++)
          result.sums[tile][2 * row] *= factor, result.sums[tile][2 * row + 1] *= factor;
        weights[row] = narrow_pair(row_scores[0], row_scores[1]);
        weights[2 + row] = narrow_pair(row_scores[2], row_scores[3]);
      }
      const u16* value = values + (i64)start * HEAD_DIM + 2 * g;
#pragma unroll
      for (int tile = 0; tile < HEAD_DIM / 16; tile++) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int at = i / 2 * 8 + 2 * t + i % 2;
          pairs[i] = start + at <= last ? *(const u32*)(value + (i64)at * HEAD_DIM + tile * 16) : 0;
        }
        u32 low[2], high[2];
        for (int i = 0; i < 2; i++) {
          low[i] = (pairs[2 * i] & 0xffff) | pairs[2 * i + 1] << 16;
          high[i] = pairs[2 * i] >> 16 | (pairs[2 * i + 1] & 0xffff0000);
        }
        multiply_tile(result.sums[2 * tile], weights, low[0], low[1]);
        multiply_tile(result.sums[2 * tile + 1], weights, high[0], high[1]);
      }
    }
    return result;
  }
};

// Attention of tokens [rows of the pass, row_tokens] over their caches, in 16 bits, to `attended` [tokens, heads,
// HEAD_DIM]. Blocks: x has a head of keys and 16 of the queries that read it, y a row. Where z has a block for each
// CHUNK of positions, the last of them adds up what they have; else one block reads all chunks. Both add in one order.
// sinks: a score of each head beside those of positions, which adds to the sum of weights alone.
KERNEL(ATTENDING_WARPS * 32)
attention(const u16* queries, const u16* keys, const u16* values, const int* rows, const int* positions, int row_tokens,
          int heads, int kv_heads, int cache_length, int window, int first_key, f32 scale, f32 cap, const f32* sinks,
          f32* partial, u32* counters, u16* attended) {
  __shared__ f32 exchanged[Attended::SIZE * 32], before[Attended::SIZE * 32];  // Of a warp; of the chunks before.
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int shared_by = heads / kv_heads, tiles = (row_tokens * shared_by + QUERIES - 1) / QUERIES;
  int kv_head = blockIdx.x / tiles, first = blockIdx.x % tiles * QUERIES;
  i64 first_token = (i64)blockIdx.y * row_tokens, cache = ((i64)rows[first_token] * kv_heads + kv_head) * cache_length;
  Attention block{keys + cache * HEAD_DIM, values + cache * HEAD_DIM, positions[first_token + row_tokens - 1], {},
                  window, first_key, scale, cap, {}};
  i64 offsets[2];
  for (int row = 0; row < 2; row++) {
    int index = first + g + 8 * row;
    bool is_there = index < row_tokens * shared_by;
    i64 token = first_token + (is_there ? index / shared_by : 0);
    block.position[row] = is_there ? positions[token] : -1;
    offsets[row] = (token * heads + kv_head * shared_by + index % shared_by) * HEAD_DIM + 4 * t;
#pragma unroll
    for (int tile = 0; tile < HEAD_DIM / 16; tile++) {
      uint2 numbers = is_there ? *(const uint2*)(queries + offsets[row] + tile * 16) : uint2{0, 0};
      block.query[tile][row] = numbers.x, block.query[tile][2 + row] = numbers.y;
    }
  }
  int last_chunk = block.last / CHUNK;  // Of what the row's first token sees the first; others see nothing before it.
  int first_chunk = window ? max(0, positions[first_token] - window + 1) / CHUNK : 0;
  bool is_split = gridDim.z > 1;
  f32* chunks = partial + (i64)(blockIdx.y * gridDim.x + blockIdx.x) * gridDim.z * Attended::SIZE * 32;
  if (warp == 0) Attended{}.save(before);
  for (int chunk = is_split ? blockIdx.z : first_chunk; chunk <= last_chunk; chunk++) {
    if (chunk >= first_chunk) {
      Attended part = block.over(chunk * CHUNK + warp * SPAN);
      for (int next = 1; next < ATTENDING_WARPS; next++) {  // In the order of positions.
        if (warp == next) part.save(exchanged);
        __syncthreads();
        if (warp == 0) part.add(Attended::load(exchanged, false));
        __syncthreads();
      }
      if (warp == 0 && is_split) part.save(chunks + (i64)chunk * Attended::SIZE * 32);
      if (warp == 0 && !is_split) {
        Attended all = Attended::load(before, false);
        all.add(part);
        all.save(before);
      }
    }
    if (is_split) break;
  }
  Attended all;
  if (is_split) {
    if (!is_last(counters + blockIdx.y * gridDim.x + blockIdx.x, gridDim.z)) return;
    for (int chunk = first_chunk; warp == 0 && chunk <= last_chunk; chunk++)
      all.add(Attended::load(chunks + (i64)chunk * Attended::SIZE * 32, true));
  } else if (warp == 0) {
    all = Attended::load(before, false);
  }
  for (int row = 0; warp == 0 && row < 2; row++) {
    if (block.position[row] < 0) continue;
    f32 total = all.total[row];
    if (sinks) total += exp2_of(sinks[kv_head * shared_by + (first + g + 8 * row) % shared_by] * LOG2_E - all.top[row]);
#pragma unroll
    for (int tile = 0; tile < HEAD_DIM / 16; tile++) {
      const f32 *even = all.sums[2 * tile] + 2 * row, *odd = all.sums[2 * tile + 1] + 2 * row;
      uint2 numbers = {narrow_pair(even[0] / total, odd[0] / total), narrow_pair(even[1] / total, odd[1] / total)};
      *(uint2*)(attended + offsets[row] + tile * 16) = numbers;
    }
  }
}

// ----------------------------------------------------------------------------------------------------- small kernels

// Look up the embeddings of a pass: block m has token first_token + m % row_tokens of row first_row + m / row_tokens,
// of ids [.., stride]. Embeddings are rows of the table [vocab, width]; ids outside of it have zeros.
#define EMBEDDING(form)                                                                                              \
  KERNEL(128)                                                                                                        \
  begin_##form(WEIGHT_PARAMETERS, const i64* ids, int stride, const i64* write_indices, int first_row,               \
               int first_token, int row_tokens, int first_cache_row, int vocab, int width, f32 scale, f32* stream,   \
               int* rows, int* positions) {                                                                          \
    begin(Weight_##form{numbers, scales, units, offsets, width}, ids, stride, write_indices, first_row, first_token, \
          row_tokens, first_cache_row, vocab, scale, stream, rows, positions);                                       \
  }
template <class Format>
FUNCTION void begin(const Format& table, const i64* ids, int stride, const i64* write_indices, int first_row,
                    int first_token, int row_tokens, int first_cache_row, int vocab, f32 scale, f32* stream, int* rows,
                    int* positions) {
  int row = first_row + blockIdx.x / row_tokens, token = first_token + blockIdx.x % row_tokens;
  i64 id = ids[(i64)row * stride + token];
  if (threadIdx.x == 0) {
    rows[blockIdx.x] = first_cache_row + row;
    positions[blockIdx.x] = (int)write_indices[row] + token;
  }
  for (int k = threadIdx.x; k < table.columns; k += blockDim.x)
    stream[(i64)blockIdx.x * table.columns + k] = id >= 0 && id < vocab ? table.at(id, k) * scale : 0;
}

// What a block's norm multiplies numbers by; 1 without gamma.
FUNCTION f32 scale_of_block(const f32* x, const f32* gamma, f32 epsilon, int width) {
  __shared__ f32 scale;
  if (!gamma) return 1;
  if (threadIdx.x < 32) {
    f32 squares = squares_of([&](int k) { return x[k]; }, width);
    if (threadIdx.x == 0) scale = reciprocal_rms(squares, width, epsilon);
  }
  __syncthreads();
  return scale;
}

// stream += norm(x): what Gemma adds to the residual stream is normalized.
KERNEL(128)
add_normalized(const f32* x, const f32* gamma, f32 epsilon, int width, f32* stream) {
  const f32* token = x + (i64)blockIdx.x * width;
  f32 scale = scale_of_block(token, gamma, epsilon, width);
  for (int k = threadIdx.x; k < width; k += blockDim.x)
    stream[(i64)blockIdx.x * width + k] += token[k] * scale * gamma[k];
}

// Copy the stream of tokens whose logits are wanted, where they are in this pass: block m has number m % num_logits of
// row m / num_logits.
KERNEL(128)
keep_wanted(const f32* stream, const i64* logits_indices, int num_logits, int first_row, int pass_rows, int first_token,
            int row_tokens, int width, f32* kept) {
  int row = blockIdx.x / num_logits - first_row;
  i64 token = logits_indices[blockIdx.x] - first_token;
  if (row < 0 || row >= pass_rows || token < 0 || token >= row_tokens) return;
  for (int k = threadIdx.x; k < width; k += blockDim.x)
    kept[(i64)blockIdx.x * width + k] = stream[(row * (i64)row_tokens + token) * width + k];
}
