// The nearest codeword of points in lanes. Part of kernels.inl.

// All codewords, one after the other. kDim: dimensions; 0: any. `t` is [k][kLanes].
template <kv_u32 kDim>
inline void look_at_all(const Codewords& codewords, const float* t, kv_u32* index) {
  constexpr kv_u32 kParts = kWidth < kLanes ? 2 : 1;
  const kv_u32 n = codewords.n(), k = kDim ? kDim : codewords.k();
  for (kv_u32 l = 0; l < kLanes; l += kParts * kWidth) {
    Vec best[kParts], x[kDim ? kDim : 1][kParts];
    Ints at[kParts], now = {};
    for (kv_u32 p = 0; p < kParts; ++p) {
      best[p] = all(kLowest);
      at[p] = now;
      for (kv_u32 i = 0; i < kDim; ++i) x[i][p] = load(t + i * kLanes + l + p * kWidth);
    }
    const float* c = codewords.scored();
    for (kv_u32 m = 0; m < n; ++m, c += k + 1) {
      Vec score[kParts];
      for (kv_u32 p = 0; p < kParts; ++p) score[p] = all(c[0]);
      for (kv_u32 i = 0; i < k; ++i)
        for (kv_u32 p = 0; p < kParts; ++p)
          score[p] = score[p] + (kDim ? x[kDim ? i : 0][p] : load(t + i * kLanes + l + p * kWidth)) * c[1 + i];
      for (kv_u32 p = 0; p < kParts; ++p) {
        const Ints better = score[p] > best[p];
        best[p] = better ? score[p] : best[p];
        at[p] = better ? now : at[p];
      }
      now = now + 1;
    }
    for (kv_u32 p = 0; p < kParts; ++p) std::memcpy(index + l + p * kWidth, &at[p], sizeof at[p]);
  }
}

// A member of the leaf that beats the best so far, the lowest of equals. `scores` is room for the leaf.
inline void look_into_leaf(const Tree& tree, kv_u32 leaf, kv_u32 k, const float* t, float* scores, float& best,
                           kv_u32& index) {
  const kv_u32 first = tree.first_group[leaf], n = (tree.first_group[leaf + 1] - first) * kGroup;
  const float* c = tree.groups.data() + (kv_u64)first * (1 + k) * kGroup;
  Vec largest = all(kLowest);
  for (kv_u32 g = 0; g < n; g += kGroup, c += (1 + k) * kGroup)
    for (kv_u32 l = 0; l < kGroup; l += kWidth) {
      Vec score = load(c + l);
      for (kv_u32 i = 0; i < k; ++i) score = score + load(c + (1 + i) * kGroup + l) * t[i * kLanes];
      store(scores + g + l, score);
      largest = score > largest ? score : largest;
    }
  float most = largest[0];
  for (kv_u32 i = 1; i < kWidth; ++i) most = largest[i] > most ? largest[i] : most;
  if (!(most >= best)) return;
  for (kv_u32 i = 0; i < n; ++i) {
    if (scores[i] != most) continue;
    const kv_u32 id = tree.ids[(kv_u64)first * kGroup + i];
    if (most > best || id < index) index = id;
    best = most;
    return;
  }
}

// The same as look_at_all says, of one point. A codeword at the distance D scores (|t|^2 - D^2) / 2, and no codeword of
// a leaf is nearer than its box. The margin is more than all roundings of scores and bounds together.
inline kv_u32 look_into_tree(const Tree& tree, kv_u32 k, const float* t, float* room) {
  float* const bounds = room;
  float* const scores = room + tree.n_leaves;
  float squared = 0;
  for (kv_u32 i = 0; i < k; ++i) squared += t[i * kLanes] * t[i * kLanes];
  const float length = std::sqrt(squared) + tree.reach;
  const float margin = length * length * (float)(8 * k + 64) * 5.9604645e-08f + 1e-36f;
  Vec least = all(-kLowest);
  Ints where = {}, now;
  for (kv_u32 i = 0; i < kWidth; ++i) now[i] = (kv_i32)i;
  for (kv_u32 leaf = 0; leaf < tree.n_leaves; leaf += kWidth) {
    Vec sum = {};
    for (kv_u32 i = 0; i < k; ++i) {
      const Vec below = load(tree.low.data() + (kv_u64)i * tree.n_leaves + leaf) - t[i * kLanes];
      const Vec above = t[i * kLanes] - load(tree.high.data() + (kv_u64)i * tree.n_leaves + leaf);
      Vec away = below > above ? below : above;
      away = away > 0.0f ? away : Vec{};
      sum = sum + away * away;
    }
    store(bounds + leaf, sum);
    const Ints less = sum < least;
    least = less ? sum : least;
    where = less ? now : where;
    now = now + (kv_i32)kWidth;
  }
  kv_u32 start = (kv_u32)where[0];
  float lowest = least[0];
  for (kv_u32 i = 1; i < kWidth; ++i)
    if (least[i] < lowest) lowest = least[i], start = (kv_u32)where[i];
  float best = kLowest;
  kv_u32 index = 0;
  look_into_leaf(tree, start, k, t, scores, best, index);
  for (kv_u32 leaf = 0; leaf < tree.n_leaves; ++leaf)
    if (leaf != start && !(bounds[leaf] > (squared - 2 * best) + margin))
      look_into_leaf(tree, leaf, k, t, scores, best, index);
  return index;
}

// Indices [n_blocks][kLanes] of the points t [n_blocks * k][kLanes].
inline void find(const Search& search, const float* t, kv_u32 n_blocks, kv_u32* index) {
  const Codewords& codewords = *search.codewords;
  const kv_u32 k = codewords.k();
  for (kv_u32 b = 0; b < n_blocks; ++b, t += k * kLanes, index += kLanes) {
    if (search.tree != nullptr) {
      for (kv_u32 l = 0; l < kLanes; ++l) index[l] = look_into_tree(*search.tree, k, t + l, search.room);
      continue;
    }
    switch (k) {
      case 2: look_at_all<2>(codewords, t, index); break;
      case 3: look_at_all<3>(codewords, t, index); break;
      case 4: look_at_all<4>(codewords, t, index); break;
      case 8: look_at_all<8>(codewords, t, index); break;
      default: look_at_all<0>(codewords, t, index);
    }
  }
}
