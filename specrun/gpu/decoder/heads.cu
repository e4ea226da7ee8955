// What targets and draft heads exchange: a feature of each token, in 16 bits [rows, cache_length, width].

// Put a norm of the stream of each token, or with no gamma the stream, beside others: joined [tokens, stride].
KERNEL(128)
join_stream(const f32* stream, const f32* gamma, f32 epsilon, int width, int stride, int offset, f32* joined) {
  const f32* from = stream + (i64)blockIdx.x * width;
  f32 scale = scale_of_block(from, gamma, epsilon, width);
  f32* to = joined + (i64)blockIdx.x * stride + offset;
  for (int k = threadIdx.x; k < width; k += blockDim.x) to[k] = gamma ? from[k] * scale * gamma[k] : from[k];
}

// Write the features [tokens, width] of a pass.
KERNEL(128)
write_features(const f32* from, const int* rows, const int* positions, int cache_length, int width, u16* features) {
  u16* to = features + ((i64)rows[blockIdx.x] * cache_length + positions[blockIdx.x]) * width;
  for (int k = threadIdx.x; k < width; k += blockDim.x) to[k] = narrow(from[(i64)blockIdx.x * width + k]);
}

// Read the feature of the token before each one; the first token of a text reads its own.
KERNEL(128)
read_features(const u16* features, const int* rows, const int* positions, int cache_length, int width, f32* to) {
  const u16* from = features + ((i64)rows[blockIdx.x] * cache_length + max(positions[blockIdx.x] - 1, 0)) * width;
  for (int k = threadIdx.x; k < width; k += blockDim.x) to[(i64)blockIdx.x * width + k] = widen(from[k]);
}

// Keep the head's own feature of the first token of each row whose logits are wanted. A row that wants none writes
// where no token stands.
KERNEL(128)
keep_features(const f32* wanted, const i64* logits_indices, int num_logits, const i64* write_indices, int first_row,
              const f32* gamma, f32 epsilon, int cache_length, int width, u16* features) {
  i64 index = logits_indices[(i64)blockIdx.x * num_logits];
  i64 position = index < 0 ? cache_length - 1 : write_indices[blockIdx.x] + index;
  const f32* from = wanted + (i64)blockIdx.x * num_logits * width;
  f32 scale = scale_of_block(from, gamma, epsilon, width);
  u16* to = features + ((i64)(first_row + blockIdx.x) * cache_length + position) * width;
  for (int k = threadIdx.x; k < width; k += blockDim.x) to[k] = narrow(gamma ? from[k] * scale * gamma[k] : from[k]);
}

// Logits [.., vocab] of those of a smaller vocabulary: an id that is not in it has none.
KERNEL(128) spread_logits(const f32* all, const int* numbers, int head_vocab, int vocab, f32* logits) {
  const f32* from = all + (i64)blockIdx.x * head_vocab;
  for (int id = blockIdx.y * blockDim.x + threadIdx.x; id < vocab; id += gridDim.y * blockDim.x)
    logits[(i64)blockIdx.x * vocab + id] = (u32)numbers[id] < (u32)head_vocab ? from[numbers[id]] : NOTHING;
}
