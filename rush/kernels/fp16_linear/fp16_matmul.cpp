// The operators: parallel loops and registration.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "fp16_matmul.h"

namespace {

using namespace rush::fp16;

constexpr int64_t kChunk = 512;  // inner dim of the left panels a thread packs at once: 64 KB in fp16
constexpr int64_t kChunkBlocks = kChunk / kInner;

at::Tensor with_unit_stride(const at::Tensor& matrix) {
  return matrix.stride(0) == 1 || matrix.stride(1) == 1 ? matrix : matrix.contiguous();
}

// An operand with its inner dim at `dim`. Of a matrix with a side of 1 both strides may be 1: either reading is right then.
Operand operand_of(const at::Tensor& matrix, int64_t dim) {
  return {matrix.const_data_ptr<float>(), matrix.stride(1 - dim), matrix.stride(dim), matrix.size(1 - dim), matrix.size(dim)};
}

// The whole right operand packed in fp16, shared by all threads.
struct Packed {
  at::Tensor buffer, inv_scales_buffer;
  half_t* values;
  float* inv_scales;
  int64_t padded, blocks;

  half_t* panels(int64_t line, int64_t inner) const { return values + line * padded + inner * kColumns; }
  float inv_scale(int64_t line, int64_t block) const { return inv_scales[line / kLines * blocks + block]; }
};

Packed packed(const Operand& right) {
  const int64_t padded = rounded_up(right.inner, kSteps), blocks = (right.inner + kInner - 1) / kInner;
  const int64_t groups = (right.length + kLines - 1) / kLines;
  const at::Tensor values = at::empty({groups * kLines, padded}, at::kHalf);
  const at::Tensor inv_scales = at::empty({groups, blocks}, at::kFloat);
  const Packed out{values, inv_scales, static_cast<half_t*>(values.mutable_data_ptr()), inv_scales.mutable_data_ptr<float>(), padded, blocks};
  at::parallel_for(0, groups * blocks, 2, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t line = index / blocks * kLines, inner = index % blocks * kInner;
      out.inv_scales[index] = pack<kColumns>(right, line, inner, out.panels(line, inner), padded * kColumns);
    }
  });
  return out;
}

// What a thread computes at a time: up to 64 rows of the result, columns `first` to `last`.
struct Tile {
  int64_t row, rows, first, last;
};

// Where a register tile is written: into the result, or into a buffer where the result ends inside it.
struct Place {
  float* to;
  int64_t stride;
};

void multiply_tile(const Operand& left, const Packed& right, const Tile& part, const float* bias, float* sums,
                   half_t* panels, float* out, int64_t columns) {
  alignas(64) float aside[kRows * kColumns];
  float inv_scales[kChunkBlocks];
  for (int64_t start = 0; start < left.inner; start += kChunk) {
    const int64_t steps = std::min(kChunk, right.padded - start), blocks = (steps + kInner - 1) / kInner;
    for (int64_t block = 0; block < blocks; ++block) {
      half_t* to = panels + block * kInner * kRows;
      inv_scales[block] = pack<kRows>(left, part.row, start + block * kInner, to, steps * kRows, sums);
    }
    for (int64_t column = part.first; column < part.last; column += kColumns) {
      const int64_t wide = std::min(kColumns, part.last - column);
      for (int64_t row = 0; row < part.rows; row += kRows) {
        const int64_t high = std::min(kRows, part.rows - row);
        const bool whole = wide == kColumns && high == kRows;
        float* place = out + (part.row + row) * columns + column;
        const Place tile = whole ? Place{place, columns} : Place{aside, kColumns};
        if (!whole && start > 0) {
          for (int64_t r = 0; r < high; ++r) std::copy(place + r * columns, place + r * columns + wide, aside + r * kColumns);
        }
        const half_t *a = panels + row * steps, *b = right.panels(column, start);
        for (int64_t block = 0; block < blocks; ++block) {
          const float inv_scale = inv_scales[block] * right.inv_scale(column, start / kInner + block);
          const int64_t at = block * kInner, length = std::min(kInner, steps - at);
          const half_t *first = a + at * kRows, *second = b + at * kColumns;
          if (start > 0 || block > 0) {
            multiply<true>(length, first, second, inv_scale, tile.to, tile.stride, tile.to, tile.stride);
          } else if (bias != nullptr) {
            multiply<true>(length, first, second, inv_scale, bias + column, 0, tile.to, tile.stride);
          } else {
            multiply<false>(length, first, second, inv_scale, nullptr, 0, tile.to, tile.stride);
          }
        }
        if (!whole) {
          for (int64_t r = 0; r < high; ++r) std::copy(aside + r * kColumns, aside + r * kColumns + wide, place + r * columns);
        }
      }
    }
  }
}

void check(const at::Tensor& left, const at::Tensor& right) {
  TORCH_CHECK(left.dim() == 2 && right.dim() == 2 && left.size(1) == right.size(0), "fp16_matmul needs [m, k] and [k, n]");
  TORCH_CHECK(left.scalar_type() == at::kFloat && right.scalar_type() == at::kFloat, "fp16_matmul takes fp32");
  TORCH_CHECK(left.size(1) > 0, "fp16_matmul needs an inner dim of at least 1");
}

at::Tensor matmul_impl(const at::Tensor& left, const at::Tensor& right, const float* bias, float* sums) {
  check(left, right);
  const int64_t rows = left.size(0), columns = right.size(1);
  if (rows == 0 || columns == 0) return at::empty({rows, columns}, left.options());
  const at::Tensor first = with_unit_stride(left), second = with_unit_stride(right);
  const Operand of_left = operand_of(first, 1);
  const Packed of_right = packed(operand_of(second, 0));
  at::Tensor out = at::empty({rows, columns}, left.options());
  float* to = out.mutable_data_ptr<float>();
  // Each group of 64 rows is one thread's; with fewer groups than threads, columns are split too, unless row sums are computed.
  const int64_t threads = at::get_num_threads(), groups = (rows + kLines - 1) / kLines;
  const int64_t shares = sums != nullptr ? 1 : std::min((threads + groups - 1) / groups, (columns + kLines - 1) / kLines);
  const int64_t share = rounded_up((columns + shares - 1) / shares, kColumns);
  at::Tensor buffer = at::empty({threads, kLines * kChunk}, at::kHalf);
  half_t* panels = static_cast<half_t*>(buffer.mutable_data_ptr());
  at::parallel_for(0, groups * shares, 1, [&](int64_t begin, int64_t end) {
    half_t* own = panels + at::get_thread_num() * kLines * kChunk;
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index / shares * kLines, from = index % shares * share;
      const Tile part{row, std::min(kLines, rows - row), from, std::min(from + share, columns)};
      multiply_tile(of_left, of_right, part, bias, sums == nullptr ? nullptr : sums + row, own, to, columns);
    }
  });
  return out;
}

at::Tensor fp16_matmul(const at::Tensor& left, const at::Tensor& right, const std::optional<at::Tensor>& bias) {
  if (!bias.has_value()) return matmul_impl(left, right, nullptr, nullptr);
  TORCH_CHECK(bias->dim() == 1 && bias->size(0) == right.size(1) && bias->scalar_type() == at::kFloat,
              "fp16_matmul needs a bias of [n] in fp32");
  const at::Tensor whole = bias->contiguous();
  const float* values = whole.const_data_ptr<float>();
  at::Tensor padded = at::zeros({rounded_up(whole.size(0), kColumns)}, whole.options());  // tiles read whole rows of it
  std::copy(values, values + whole.size(0), padded.mutable_data_ptr<float>());
  return matmul_impl(left, right, padded.const_data_ptr<float>(), nullptr);
}

std::tuple<at::Tensor, at::Tensor> fp16_matmul_with_row_sums(const at::Tensor& left, const at::Tensor& right) {
  at::Tensor sums = at::zeros({left.size(0)}, left.options());
  at::Tensor out = matmul_impl(left, right, nullptr, sums.mutable_data_ptr<float>());
  return {out, sums};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rush, library) {
  library.def("fp16_matmul(Tensor left, Tensor right, Tensor? bias) -> Tensor");
  library.def("fp16_matmul_with_row_sums(Tensor left, Tensor right) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(rush, CPU, library) {
  library.impl("fp16_matmul", fp16_matmul);
  library.impl("fp16_matmul_with_row_sums", fp16_matmul_with_row_sums);
}
