// The loop over the steps of blocks: included once by each instruction-set header, inside its namespace and with its
// KV_LEVEL, as functions for one instruction set must not be shared with another.

// What the loop keeps in registers of a run's words.
struct Cursor {
  const kv_u8* next;
  const kv_u8* safe;
};

template <bool kRenormalise>
KV_LEVEL void decode_step(BlockRun& run, const Components& c, const kv_u32* slots, States& x, Cursor& cursor,
                          kv_u32 step, kv_u32 lanes, Magnitude& magnitude) {
  if (KV_UNLIKELY(cursor.next > cursor.safe)) {
    run.words.next = cursor.next;
    run.go_on();
    cursor = {run.words.next, run.words.safe};
  }
  const std::size_t at = (std::size_t)step * kStates;
  const Slots met = x.template symbols<kRenormalise>(lanes, slots, c.tables + at, cursor.next);
  const kv_u32 escaped = escapes(met, lanes);
  if (KV_UNLIKELY(c.special[step] | escaped)) {
    Residuals q = values(met);
    if (c.special[step] & kHasShift) x.template low_bits<kRenormalise>(lanes, c.shifts + at, q, cursor.next);
    if (escaped) {
      kv_i32 residuals[kStates];
      store(q, residuals);
      run.words.next = cursor.next;
      run.patch(escaped, step, residuals);
      cursor = {run.words.next, run.words.safe};
      q = load(residuals);
    }
    reconstruct(lanes, times(q, c.scale), c.mean + at, c.rho + at, c.previous + at, magnitude);
  } else {
    reconstruct(lanes, scaled(met, c.scale_shift), c.mean + at, c.rho + at, c.previous + at, magnitude);
  }
}

// The values of a token, just decoded, to the output.
KV_LEVEL void emit(BlockRun& run, const Magnitude& magnitude) {
  run.fault |= magnitude.reaches(kValueLimit);
  if (!run.emits()) return;
  const kv_i32* values = run.components.previous;
  const kv_u32 heads = run.stream().heads, n = run.stream().head_dim;
  const float unit = run.stream().unit;
  if (run.emission == kGeneral || magnitude.reaches(run.large)) {
    run.emit_general();
  } else if (run.emission == kPlain16) {
    for (kv_u32 h = 0; h < heads; ++h, values += n) put_plain16(values, n, unit, run.target<kv_u16>(h));
  } else if (run.emission == kPlain32) {
    for (kv_u32 h = 0; h < heads; ++h, values += n) put_plain32(values, n, unit, run.target<float>(h));
  } else {
    const float *cos = run.cos(), *sin = run.sin();
    bool overflow = false;
    for (kv_u32 h = 0; h < heads; ++h, values += n)
      overflow |= run.emission == kRotated16
                      ? put_rotated16(values, n, unit, cos, sin, run.scratch(), run.target<kv_u16>(h))
                      : put_rotated32(values, n, unit, cos, sin, run.target<float>(h));
    if (KV_UNLIKELY(overflow)) run.overflowed();
  }
}

// `rows` tokens of each run, all steps of which renormalise. Steps of two blocks alternate: each waits for its own last
// step only, so that one fills the other's waiting. Runs have as many components. Ends early at a fault of either.
template <int kRuns>
KV_LEVEL void decode_rows(const kv_u32* slots, BlockRun* const (&runs)[kRuns], kv_u64 rows) {
  States x[kRuns];
  Cursor cursors[kRuns];
  Components components[kRuns];  // copies, which stores into the arrays cannot change
#pragma GCC unroll 2
  for (int r = 0; r < kRuns; ++r) {
    x[r].load(runs[r]->states);
    cursors[r] = {runs[r]->words.next, runs[r]->words.safe};
    components[r] = runs[r]->components;
  }
  const kv_u32 last_lanes = runs[0]->last_lanes;
  const kv_u32 full_steps = runs[0]->steps - (last_lanes != kStates);
  for (bool fault = false; rows > 0 && !fault; --rows) {
    Magnitude magnitudes[kRuns];
    for (kv_u32 step = 0; step < full_steps; ++step) {
#pragma GCC unroll 2
      for (int r = 0; r < kRuns; ++r)  // unrolled, so that states stay in registers
        decode_step<true>(*runs[r], components[r], slots, x[r], cursors[r], step, kStates, magnitudes[r]);
    }
    if (last_lanes != kStates)
#pragma GCC unroll 2
      for (int r = 0; r < kRuns; ++r)
        decode_step<true>(*runs[r], components[r], slots, x[r], cursors[r], full_steps, last_lanes, magnitudes[r]);
#pragma GCC unroll 2
    for (int r = 0; r < kRuns; ++r) {
      emit(*runs[r], magnitudes[r]);
      fault |= runs[r]->fault;
      ++runs[r]->token;
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRuns; ++r) {
    x[r].store(runs[r]->states);
    runs[r]->words.next = cursors[r].next;
  }
}

// The tokens before `until` whose steps have to be told apart: about the last one of a block.
KV_LEVEL void decode_ending(const kv_u32* slots, BlockRun& run, kv_u64 until) {
  States x;
  Cursor cursor{run.words.next, run.words.safe};
  x.load(run.states);
  for (; run.token < until && !run.fault; ++run.token) {
    Magnitude magnitude;
    for (kv_u32 step = 0; step < run.steps; ++step) {
      if (!run.bare && run.token * run.steps + step == run.bare_from) {
        x.store(run.states);
        run.make_bare();
        x.load(run.states);
      }
      const kv_u32 lanes = step + 1 < run.steps ? kStates : run.last_lanes;
      if (run.bare)
        decode_step<false>(run, run.components, slots, x, cursor, step, lanes, magnitude);
      else
        decode_step<true>(run, run.components, slots, x, cursor, step, lanes, magnitude);
    }
    emit(run, magnitude);
  }
  x.store(run.states);
  run.words.next = cursor.next;
}

KV_LEVEL_CALL inline void decode_alone(const kv_u32* slots, BlockRun& run, kv_u64 until) {
  BlockRun* const runs[1] = {&run};
  if (!run.fault) decode_rows(slots, runs, run.plain_rows(until));
  if (!run.fault) decode_ending(slots, run, until);
}

KV_LEVEL_CALL inline void decode_together(const kv_u32* slots, BlockRun& first, BlockRun& second) {
  BlockRun* const runs[2] = {&first, &second};
  decode_rows(slots, runs, std::min(first.plain_rows(first.stop()), second.plain_rows(second.stop())));
}

// One or two blocks from their first token to the last one wanted.
inline void decode(const kv_u32* slots, BlockRun* const* runs, kv_u32 n_runs) {
  for (kv_u32 r = 0; r < n_runs; ++r) {
    if (runs[r]->sinks() > 0) {
      runs[r]->enter(true);
      decode_alone(slots, *runs[r], runs[r]->sinks());
    }
    runs[r]->enter(false);
  }
  if (kTogether && n_runs == 2 && !runs[0]->fault && !runs[1]->fault && runs[0]->steps == runs[1]->steps &&
      runs[0]->last_lanes == runs[1]->last_lanes)
    decode_together(slots, *runs[0], *runs[1]);
  for (kv_u32 r = 0; r < n_runs; ++r) decode_alone(slots, *runs[r], runs[r]->stop());
}
