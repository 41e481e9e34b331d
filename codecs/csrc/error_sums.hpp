// Errors that an encoder measures.
#pragma once

#include "lane.hpp"

namespace kv {

struct ErrorSums {
  double max_error = 0;
  double sum_squares = 0;
  kv_u64 n_values = 0;

  void add(const ErrorSums& other) {
    max_error = other.max_error > max_error ? other.max_error : max_error;
    sum_squares += other.sum_squares;
    n_values += other.n_values;
  }
};

}  // namespace kv
