// Independent pieces of work on a few threads of this call's own.
#pragma once

#include <atomic>
#include <cstddef>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace kv {

// Calls work(i, scratch) for i in [0, n), each once, on up to n_threads threads; every thread has a Scratch of its
// own. Pieces are handed out one by one, as their sizes differ. False: memory ran out.
template <class Scratch, class Work>
bool run_pieces(std::size_t n, unsigned n_threads, Work work) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> out_of_memory{false};
  auto loop = [&] {
    try {
      Scratch scratch;
      for (std::size_t i = next++; i < n; i = next++) work(i, scratch);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  };
  std::vector<std::thread> threads;
  try {
    for (unsigned i = 1; i < n_threads && i < n; ++i) threads.emplace_back(loop);
  } catch (const std::system_error&) {
    // The system gives no more threads: those that run do the work.
  }
  loop();
  for (std::thread& thread : threads) thread.join();
  return !out_of_memory;
}

}  // namespace kv
