// The nearest codeword of points in lanes: the first of the largest float32 score, every operation rounded by itself.
// Part of kernels.inl.
//
// A first look at all codewords, or at boxes around them, says which may be the nearest; these are scored exactly. The
// margin of that look is more than all roundings of scores and bounds together.

// Scores of a group's members, for the point t[0], t[kLanes], .., and what is better than the best so far.
template <kv_u32 kDim>
inline void look_into_group(const Finder& finder, kv_u32 group, const float* t, float& best, kv_u32& index) {
  const kv_u32 k = kDim ? kDim : finder.k;
  constexpr kv_u32 kParts = kGroup / kWidth;
  const float* const c = finder.groups.data() + (kv_u64)group * (1 + k) * kGroup;
  Vec scores[kParts], most = all(-kInfinity);
  for (kv_u32 p = 0; p < kParts; ++p) scores[p] = load(c + p * kWidth);
  for (kv_u32 i = 0; i < k; ++i) {
    const Vec x = all(t[i * kLanes]);
    for (kv_u32 p = 0; p < kParts; ++p) scores[p] = scores[p] + x * load(c + (1 + i) * kGroup + p * kWidth);
  }
  for (kv_u32 p = 0; p < kParts; ++p) most = larger(scores[p], most);
  const float highest = largest_lane(most);
  if (!(highest >= best)) return;
  kv_u32 equal = 0;
  for (kv_u32 p = 0; p < kParts; ++p) equal |= lanes_of(scores[p] == all(highest)) << p * kWidth;
  if (equal == 0) return;
  const kv_u32 id = finder.ids.data()[(kv_u64)group * kGroup + (kv_u32)__builtin_ctz(equal)];
  // Where every score is minus infinity, the first codeword stays.
  if (highest > best || id < index) index = id;
  best = highest;
}

// Of points of these squared lengths. Scores and bounds are sums of less than k + 4 terms of (|t| + reach)^2 together,
// which is at most twice the sum below, each rounded k + 4 times.
template <class T>
inline T margin_of(const Finder& finder, T squared) {
  return (squared + finder.reach * finder.reach) * ((float)(16 * finder.k + 128) * 5.9604645e-08f) + 1e-36f;
}

// Points t [k][kLanes]. kDim: k; 0: any.
template <kv_u32 kDim>
inline void look_at_all(const Finder& finder, const float* t, float* room, kv_u32* index) {
  constexpr kv_u32 kParts = kWidth < kLanes ? 2 : 1, kAtOnce = kParts * kWidth;
  const kv_u32 k = kDim ? kDim : finder.k, n_groups = finder.n_groups;
  for (kv_u32 l = 0; l < kLanes; l += kAtOnce, t += kAtOnce, index += kAtOnce) {
    Vec best[kParts], squared[kParts] = {}, x[kDim ? kDim : 1][kParts];
    for (kv_u32 p = 0; p < kParts; ++p) best[p] = all(-kInfinity);
    for (kv_u32 i = 0; i < k; ++i)
      for (kv_u32 p = 0; p < kParts; ++p) {
        const Vec value = load(t + i * kLanes + p * kWidth);
        if (kDim) x[kDim ? i : 0][p] = value;
        squared[p] = squared[p] + value * value;
      }
    const float* c = finder.groups.data();
    for (kv_u32 g = 0; g < n_groups; ++g, c += (1 + k) * kGroup) {
      Vec most[kParts];
      for (kv_u32 p = 0; p < kParts; ++p) most[p] = all(-kInfinity);
      for (kv_u32 m = 0; m < kGroup; ++m) {
        Vec score[kParts];
        for (kv_u32 p = 0; p < kParts; ++p) score[p] = all(c[m]);
        for (kv_u32 i = 0; i < k; ++i)
          for (kv_u32 p = 0; p < kParts; ++p)
            score[p] = about(kDim ? x[kDim ? i : 0][p] : load(t + i * kLanes + p * kWidth),
                             all(c[(1 + i) * kGroup + m]), score[p]);
        for (kv_u32 p = 0; p < kParts; ++p) most[p] = larger(score[p], most[p]);
      }
      for (kv_u32 p = 0; p < kParts; ++p) {
        store(room + g * kAtOnce + p * kWidth, most[p]);
        best[p] = larger(most[p], best[p]);
      }
    }
    float exact[kAtOnce];
    for (kv_u32 p = 0; p < kParts; ++p) {
      best[p] = best[p] - margin_of(finder, squared[p]);
      store(exact + p * kWidth, all(-kInfinity));
    }
    for (kv_u32 i = 0; i < kAtOnce; ++i) index[i] = 0;
    for (kv_u32 g = 0; g < n_groups; ++g)
      for (kv_u32 p = 0; p < kParts; ++p)
        for (kv_u32 hits = lanes_of(~(load(room + g * kAtOnce + p * kWidth) < best[p])); hits != 0;
             hits &= hits - 1) {
          const kv_u32 lane = p * kWidth + (kv_u32)__builtin_ctz(hits);
          look_into_group<kDim>(finder, g, t + lane, exact[lane], index[lane]);
        }
  }
}

template <kv_u32 kDim>
inline void look_into_leaf(const Finder& finder, kv_u32 leaf, const float* t, float& best, kv_u32& index) {
  const kv_u32 last = finder.first_group.data()[leaf + 1];
  for (kv_u32 g = finder.first_group.data()[leaf]; g < last; ++g) look_into_group<kDim>(finder, g, t, best, index);
}

// One point. A codeword at the distance D scores (|t|^2 - D^2) / 2, and none of a leaf is nearer than its box.
template <kv_u32 kDim>
inline kv_u32 look_into_boxes(const Finder& finder, const float* t, float* bounds) {
  const kv_u32 k = kDim ? kDim : finder.k, n = finder.n_leaves;
  const float *const low = finder.low.data(), *const high = finder.high.data();
  float squared = 0;
  for (kv_u32 i = 0; i < k; ++i) squared += t[i * kLanes] * t[i * kLanes];
  const float margin = margin_of(finder, squared);
  Vec least = all(kInfinity);
  for (kv_u32 leaf = 0; leaf < n; leaf += kWidth) {
    Vec sum = {};
    for (kv_u32 i = 0; i < k; ++i) {
      const Vec x = all(t[i * kLanes]);
      const Vec away = larger(larger(load(low + (kv_u64)i * n + leaf) - x, x - load(high + (kv_u64)i * n + leaf)), Vec{});
      sum = sum + away * away;
    }
    store(bounds + leaf, sum);
    least = sum < least ? sum : least;
  }
  // The nearest box first: what it holds spares most of the others.
  const float lowest = -largest_lane(-least);
  float best = -kInfinity;
  kv_u32 index = 0, start = n;
  for (kv_u32 leaf = 0; leaf < n && start == n; leaf += kWidth) {
    const kv_u32 equal = lanes_of(load(bounds + leaf) == all(lowest));
    if (equal != 0) start = leaf + (kv_u32)__builtin_ctz(equal);
  }
  if (start < n) look_into_leaf<kDim>(finder, start, t, best, index);
  for (kv_u32 leaf = 0; leaf < n; leaf += kWidth)
    for (kv_u32 hits = lanes_of(~(load(bounds + leaf) > all((squared - 2 * best) + margin))); hits != 0; hits &= hits - 1) {
      const kv_u32 hit = leaf + (kv_u32)__builtin_ctz(hits);
      if (hit != start && !(bounds[hit] > (squared - 2 * best) + margin)) look_into_leaf<kDim>(finder, hit, t, best, index);
    }
  return index;
}

template <kv_u32 kDim>
inline void find_dim(const Search& search, const float* t, kv_u32 n_blocks, kv_u32* index) {
  const Finder& finder = *search.finder;
  for (kv_u32 b = 0; b < n_blocks; ++b, t += finder.k * kLanes, index += kLanes) {
    if (finder.n_leaves == 0) {
      look_at_all<kDim>(finder, t, search.room, index);
      continue;
    }
    for (kv_u32 l = 0; l < kLanes; ++l) index[l] = look_into_boxes<kDim>(finder, t + l, search.room);
  }
}

// Indices [n_blocks][kLanes] of the points t [n_blocks * k][kLanes].
inline void find(const Search& search, const float* t, kv_u32 n_blocks, kv_u32* index) {
  switch (search.finder->k) {
    case 2: return find_dim<2>(search, t, n_blocks, index);
    case 3: return find_dim<3>(search, t, n_blocks, index);
    case 4: return find_dim<4>(search, t, n_blocks, index);
    case 8: return find_dim<8>(search, t, n_blocks, index);
    default: return find_dim<0>(search, t, n_blocks, index);
  }
}
