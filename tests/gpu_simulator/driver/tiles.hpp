// Products of a warp's tiles: D[16, 8] = A[16, 16] B[16, 8] + C, from the PTX ISA's pictures of m16n8k16.
#pragma once

#include "arithmetic.hpp"
#include "kernel.hpp"

namespace gpu {

// What a lane has of the three matrices, two numbers of 16 bits in a word.
struct Fragment {
  u32 a[4], b[2];
  f32 c[4];
};

struct Half {
  static f32 widen(u16 bits) { return static_cast<f32>(std::bit_cast<f16>(bits)); }
  static u16 round(f32 value) { return std::bit_cast<u16>(static_cast<f16>(value)); }
};

struct Bfloat {
  static f32 widen(u16 bits) { return widen_bf16(bits); }
  static u16 round(f32 value) { return round_to_bf16(value); }
};

// a b + c of two pairs of numbers. Products of 11 bits are exact in double.
template <typename Number>
u32 fma_pairs(u32 a, u32 b, u32 c) {
  auto one = [](u16 x, u16 y, u16 z) {
    f64 sum = static_cast<f64>(Number::widen(x)) * Number::widen(y) + Number::widen(z);
    return static_cast<u32>(Number::round(static_cast<f32>(sum)));
  };
  return one(a & 0xffff, b & 0xffff, c & 0xffff) | one(a >> 16, b >> 16, c >> 16) << 16;
}

// Sums in float, one product after the other; a GPU's order is not known.
template <typename Number>
void multiply(void* const* lanes) {
  f32 a[16][16], b[16][8];
  auto of = [&](int lane) { return static_cast<Fragment*>(lanes[lane]); };
  for (int lane = 0; lane < 32; lane++)
    for (int high = 0; high < 2; high++) {
      int group = lane / 4, column = lane % 4 * 2 + high;
      auto half = [&](u32 word) { return Number::widen(static_cast<u16>(word >> 16 * high)); };
      for (int i = 0; i < 4; i++) a[group + i % 2 * 8][column + i / 2 * 8] = half(of(lane)->a[i]);
      for (int i = 0; i < 2; i++) b[column + i * 8][group] = half(of(lane)->b[i]);
    }
  for (int row = 0; row < 16; row++) {
    f32 sums[8];
    auto place = [&](int column) { return &of(row % 8 * 4 + column / 2)->c[row / 8 * 2 + column % 2]; };
    for (int column = 0; column < 8; column++) sums[column] = *place(column);
    for (int k = 0; k < 16; k++)
      for (int column = 0; column < 8; column++) sums[column] += a[row][k] * b[k][column];
    for (int column = 0; column < 8; column++) *place(column) = sums[column];
  }
}

}  // namespace gpu
