// The operators: which thread makes which part of the result, and what torch needs to call them.
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

constexpr int64_t kChunk = 512;  // steps along the inner dim whose left panels a thread holds at once: 64 KB in fp16
constexpr int64_t kChunkBlocks = kChunk / kInner;

at::Tensor with_unit_stride(const at::Tensor& matrix) {
  return matrix.stride(0) == 1 || matrix.stride(1) == 1 ? matrix : matrix.contiguous();
}

// A factor with its inner dim at `dim`. Of a matrix with a side of 1 both strides may be 1: then a step to the next value
// of that side is never made, and either reading is right.
Factor factor_of(const at::Tensor& matrix, int64_t dim) {
  return {matrix.const_data_ptr<float>(), matrix.stride(1 - dim), matrix.stride(dim), matrix.size(1 - dim), matrix.size(dim)};
}

// The right factor as a whole in fp16, for all threads to read.
struct Packed {
  at::Tensor room, units_room;
  half_t* values;
  float* units;
  int64_t padded, blocks;

  half_t* panels(int64_t line, int64_t inner) const { return values + line * padded + inner * kColumns; }
  float unit(int64_t line, int64_t block) const { return units[line / kLines * blocks + block]; }
};

Packed packed(const Factor& right) {
  const int64_t padded = rounded_up(right.inner, kSteps), blocks = (right.inner + kInner - 1) / kInner;
  const int64_t groups = (right.length + kLines - 1) / kLines;
  const at::Tensor values = at::empty({groups * kLines, padded}, at::kHalf);
  const at::Tensor units = at::empty({groups, blocks}, at::kFloat);
  const Packed out{values, units, static_cast<half_t*>(values.mutable_data_ptr()), units.mutable_data_ptr<float>(), padded, blocks};
  at::parallel_for(0, groups * blocks, 2, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t line = index / blocks * kLines, inner = index % blocks * kInner;
      out.units[index] = pack<kColumns>(right, line, inner, out.panels(line, inner), padded * kColumns);
    }
  });
  return out;
}

// What a thread makes at a time: up to 64 rows of the result, and of them the columns from `first` to `last`.
struct Part {
  int64_t row, rows, first, last;
};

// A tile of the result, at its place or, where the result ends inside of it, beside it.
struct Place {
  float* to;
  int64_t stride;
};

void multiply_part(const Factor& left, const Packed& right, const Part& part, const float* bias, float* sums,
                   half_t* panels, float* out, int64_t columns) {
  alignas(64) float aside[kRows * kColumns];
  float units[kChunkBlocks];
  for (int64_t start = 0; start < left.inner; start += kChunk) {
    const int64_t steps = std::min(kChunk, right.padded - start), blocks = (steps + kInner - 1) / kInner;
    for (int64_t block = 0; block < blocks; ++block) {
      half_t* to = panels + block * kInner * kRows;
      units[block] = pack<kRows>(left, part.row, start + block * kInner, to, steps * kRows, sums);
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
          const float unit = units[block] * right.unit(column, start / kInner + block);
          const int64_t at = block * kInner, length = std::min(kInner, steps - at);
          const half_t *first = a + at * kRows, *second = b + at * kColumns;
          if (start > 0 || block > 0) {
            multiply<true>(length, first, second, unit, tile.to, tile.stride, tile.to, tile.stride);
          } else if (bias != nullptr) {
            multiply<true>(length, first, second, unit, bias + column, 0, tile.to, tile.stride);
          } else {
            multiply<false>(length, first, second, unit, nullptr, 0, tile.to, tile.stride);
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

at::Tensor multiplied(const at::Tensor& left, const at::Tensor& right, const float* bias, float* sums) {
  check(left, right);
  const int64_t rows = left.size(0), columns = right.size(1);
  if (rows == 0 || columns == 0) return at::empty({rows, columns}, left.options());
  const at::Tensor first = with_unit_stride(left), second = with_unit_stride(right);
  const Factor of_left = factor_of(first, 1);
  const Packed of_right = packed(factor_of(second, 0));
  at::Tensor out = at::empty({rows, columns}, left.options());
  float* to = out.mutable_data_ptr<float>();
  // Each part of 64 rows is one thread's; where there are fewer of them than threads, columns are shared out too, unless sums
  // over all of a row are wanted once.
  const int64_t threads = at::get_num_threads(), groups = (rows + kLines - 1) / kLines;
  const int64_t shares = sums != nullptr ? 1 : std::min((threads + groups - 1) / groups, (columns + kLines - 1) / kLines);
  const int64_t share = rounded_up((columns + shares - 1) / shares, kColumns);
  at::Tensor room = at::empty({threads, kLines * kChunk}, at::kHalf);
  half_t* panels = static_cast<half_t*>(room.mutable_data_ptr());
  at::parallel_for(0, groups * shares, 1, [&](int64_t begin, int64_t end) {
    half_t* own = panels + at::get_thread_num() * kLines * kChunk;
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index / shares * kLines, from = index % shares * share;
      const Part part{row, std::min(kLines, rows - row), from, std::min(from + share, columns)};
      multiply_part(of_left, of_right, part, bias, sums == nullptr ? nullptr : sums + row, own, to, columns);
    }
  });
  return out;
}

at::Tensor fp16_matmul(const at::Tensor& left, const at::Tensor& right, const std::optional<at::Tensor>& bias) {
  if (!bias.has_value()) return multiplied(left, right, nullptr, nullptr);
  TORCH_CHECK(bias->dim() == 1 && bias->size(0) == right.size(1) && bias->scalar_type() == at::kFloat,
              "fp16_matmul needs a bias of [n] in fp32");
  const at::Tensor whole = bias->contiguous();
  const float* values = whole.const_data_ptr<float>();
  at::Tensor padded = at::zeros({rounded_up(whole.size(0), kColumns)}, whole.options());  // tiles read it by whole rows
  std::copy(values, values + whole.size(0), padded.mutable_data_ptr<float>());
  return multiplied(left, right, padded.const_data_ptr<float>(), nullptr);
}

std::tuple<at::Tensor, at::Tensor> fp16_matmul_with_row_sums(const at::Tensor& left, const at::Tensor& right) {
  at::Tensor sums = at::zeros({left.size(0)}, left.options());
  at::Tensor out = multiplied(left, right, nullptr, sums.mutable_data_ptr<float>());
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
