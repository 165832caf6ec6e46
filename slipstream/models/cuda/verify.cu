// Attention of a few fresh tokens of each row over its paged keys and values. See verify.py.
//
// A program owns one KV head of one tile of queries. Its warps take positions in turns, 16 at a time,
// each with a ring of its own, and never wait for one another: running maximum, sum and weighted
// values are a warp's own until the end, when all are merged in shared memory.
//
// The compiler's options set GROUP (query heads a KV head), BLOCKS (of 16 query rows: 1 or 2), PAGE,
// CAUSAL and STAGES. A head has 128 dimensions.

typedef unsigned int u32;
typedef unsigned short u16;

constexpr int DIM = 128, WARPS = 8, SPAN = 16;  // positions a warp takes at once
constexpr int ROWS = 16 * BLOCKS;
constexpr int TILE_BYTES = SPAN * DIM * 2;     // keys or values of a span
constexpr int STAGE_BYTES = 2 * TILE_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int WIDTH = DIM + 8;  // floats a row of partial results, apart to spread banks
static_assert(ROWS * WIDTH * 4 <= RING_BYTES, "partial results take the ring's place");

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Where 16 bytes of a tile lie: chunk of a row of 256 bytes, turned so that eight rows spread.
__device__ u32 spot(u32 tile, int row, int chunk) {
  return tile + row * (DIM * 2) + ((chunk ^ (row & 7)) << 4);
}

__device__ void load4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ void load4_turned(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ u32 pair(float low, float high) {  // two bfloat16
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Row {
  int start, end, first, length, head, kv;
  long long token;   // flat index of the row's first
  const int* pages;  // of this row
};

struct State {  // a thread's share: two rows of every block
  float out[BLOCKS][DIM / 8][4], peak[BLOCKS][2], total[BLOCKS][2];
};

__device__ int page_of(const Row& r, int span) { return r.pages[span * SPAN / PAGE]; }

// Asks for the keys and values of the span's positions; those past the end are the last one's.
__device__ void fetch(u32 stage, const u16* storage, const Row& r, int at, int page) {
  int lane = threadIdx.x % 32;
  long long first = (long long)page * PAGE + at % PAGE;
#pragma unroll
  for (int i = 0; i < SPAN / 2; i++) {
    int line = 2 * i + lane / 16, chunk = lane % 16;
    int within = at + line < r.end ? line : r.end - 1 - at;
    const u16* key = storage + ((first + within) * 2 * r.kv + r.head) * DIM + chunk * 8;
    copy16(spot(stage, line, chunk), key);
    copy16(spot(stage + TILE_BYTES, line, chunk), key + (long long)r.kv * DIM);
  }
}

__device__ void score(float (&s)[BLOCKS][2][4], u32 queries, u32 keys) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < DIM / 16; k++) {
    u32 b[4];
    load4(b, spot(keys, lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
    for (int m = 0; m < BLOCKS; m++) {
      u32 a[4];
      load4(a, spot(queries, m * 16 + lane % 16, 2 * k + lane / 16));
      mma(s[m][0], a, b[0], b[1]);
      mma(s[m][1], a, b[2], b[3]);
    }
  }
}

// Scores become weights; what was summed before shrinks where the maximum rose.
__device__ void weigh(float (&s)[BLOCKS][2][4], State& state, const Row& r, int at, float scale) {
  int lane = threadIdx.x % 32;
  bool all = at + SPAN <= r.start;  // every query sees the whole span
#pragma unroll
  for (int m = 0; m < BLOCKS; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int row = m * 16 + h * 8 + lane / 4;
      int last = CAUSAL ? r.start + r.first + row / GROUP : r.end - 1;
      if (last >= r.end) last = r.end - 1;
      float high = -1e30f;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float& x = s[m][n][2 * h + c];
          bool seen = all || at + n * 8 + lane % 4 * 2 + c <= last;
          x = seen ? x * scale : -1e30f;
          high = fmaxf(high, x);
        }
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      float peak = fmaxf(state.peak[m][h], high), shrink = power(state.peak[m][h] - peak);
      state.peak[m][h] = peak;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float& x = s[m][n][2 * h + c];
          x = x > -1e29f ? power(x - peak) : 0.0f;
          sum += x;
        }
      state.total[m][h] = state.total[m][h] * shrink + sum;
      if (__any_sync(~0u, shrink != 1.0f)) {
#pragma unroll
        for (int n = 0; n < DIM / 8; n++) {
          state.out[m][n][2 * h] *= shrink;
          state.out[m][n][2 * h + 1] *= shrink;
        }
      }
    }
  }
}

__device__ void gather(const float (&s)[BLOCKS][2][4], State& state, u32 values) {
  int lane = threadIdx.x % 32;
  u32 a[BLOCKS][4];
#pragma unroll
  for (int m = 0; m < BLOCKS; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) a[m][i] = pair(s[m][i / 2][i % 2 * 2], s[m][i / 2][i % 2 * 2 + 1]);
#pragma unroll
  for (int n = 0; n < DIM / 16; n++) {
    u32 b[4];
    load4_turned(b, spot(values, lane % 16, 2 * n + lane / 16));
#pragma unroll
    for (int m = 0; m < BLOCKS; m++) {
      mma(state.out[m][2 * n], a[m], b[0], b[1]);
      mma(state.out[m][2 * n + 1], a[m], b[2], b[3]);
    }
  }
}

__device__ void keep(const State& state, float* parts, float* peaks, float* totals) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < BLOCKS; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int row = m * 16 + h * 8 + lane / 4;
      float total = state.total[m][h];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (lane % 4 == 0) {
        peaks[row] = state.peak[m][h];
        totals[row] = total;
      }
#pragma unroll
      for (int n = 0; n < DIM / 8; n++) {
        float* to = parts + row * WIDTH + n * 8 + lane % 4 * 2;
        *(float2*)to = make_float2(state.out[m][n][2 * h], state.out[m][n][2 * h + 1]);
      }
    }
}

// All warps' results of a row, added up with the weights their maxima give them.
__device__ void merge(const char* memory, const float* peaks, const float* totals, u16* out,
                      const Row& r) {
  for (int row = threadIdx.x / 8; row < ROWS; row += WARPS * 4) {
    int token = r.first + row / GROUP;
    if (token >= r.length) continue;
    float peak = -1e30f, total = 0.0f, share[WARPS];
    for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, peaks[w * ROWS + row]);
    for (int w = 0; w < WARPS; w++) {
      share[w] = power(peaks[w * ROWS + row] - peak);
      total += share[w] * totals[w * ROWS + row];
    }
    long long head = (r.token + token) * GROUP * r.kv + row % GROUP * r.kv + r.head;
    for (int d = threadIdx.x % 8 * 4; d < DIM; d += 32) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int w = 0; w < WARPS; w++) {
        float4 x = *(const float4*)(memory + w * RING_BYTES + (row * WIDTH + d) * 4);
        sum.x += share[w] * x.x, sum.y += share[w] * x.y;
        sum.z += share[w] * x.z, sum.w += share[w] * x.w;
      }
      uint2 both = {pair(sum.x / total, sum.y / total), pair(sum.z / total, sum.w / total)};
      *(uint2*)(out + head * DIM + d) = both;
    }
  }
}

__device__ void read_queries(u32 to, const u16* qkv, const Row& r) {
  for (int i = threadIdx.x; i < ROWS * 16; i += WARPS * 32) {
    int row = i / 16, chunk = i % 16, token = r.first + row / GROUP;
    if (token >= r.length) token = r.length - 1;  // a row nobody reads
    long long head = (r.token + token) * (GROUP + 2) * r.kv + row % GROUP * r.kv + r.head;
    copy16(spot(to, row, chunk), qkv + head * DIM + chunk * 8);
  }
}

extern "C" __global__ void __maxnreg__(184)
    verify(const u16* qkv, const u16* storage, u16* out, const int* tile_row,
           const int* tile_first, const int* row_start, const int* row_length,
           const int* row_token, const int* pages, int pages_width, int kv, float scale) {
  extern __shared__ char memory[];
  __shared__ float peaks[WARPS * ROWS], totals[WARPS * ROWS];
  __shared__ alignas(16) char queries[ROWS * DIM * 2];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  int row = tile_row[blockIdx.x], warp = threadIdx.x / 32;
  Row r = {row_start[row], 0, tile_first[blockIdx.x], row_length[row], (int)blockIdx.y, kv,
           row_token[row], pages + (long long)row * pages_width};
  r.end = r.start + r.length;
  if (CAUSAL && r.end > r.start + r.first + ROWS / GROUP) r.end = r.start + r.first + ROWS / GROUP;
  u32 ring = shared_address(memory) + warp * RING_BYTES, q = shared_address(queries);
  int spans = r.first < r.length ? (r.end + SPAN - 1) / SPAN : 0;
  int old = r.start / SPAN;  // spans that the kernel in front does not write
  bool waited = false;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    int span = warp + i * WARPS;
    if (span >= old && !waited) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      waited = true;
    }
    if (span < spans) fetch(ring + i * STAGE_BYTES, storage, r, span * SPAN, page_of(r, span));
    commit();
  }
  if (!waited) asm volatile("griddepcontrol.wait;" ::: "memory");
  if (spans) read_queries(q, qkv, r);
  commit();
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  State state = {};
  for (int m = 0; m < BLOCKS; m++) state.peak[m][0] = state.peak[m][1] = -1e30f;
  int stage = 0, ahead = warp + (STAGES - 1) * WARPS;
  int page = ahead < spans ? page_of(r, ahead) : 0;  // known before it is needed
  for (int span = warp; span < spans; span += WARPS) {
    int next = span + (STAGES - 1) * WARPS, there = (stage + STAGES - 1) % STAGES;
    __syncwarp();  // all lanes have read the stage that is filled again
    if (next < spans) fetch(ring + there * STAGE_BYTES, storage, r, next * SPAN, page);
    commit();
    if (next + WARPS < spans) page = page_of(r, next + WARPS);
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncwarp();
    float s[BLOCKS][2][4] = {};
    u32 keys = ring + stage * STAGE_BYTES;
    score(s, q, keys);
    weigh(s, state, r, span * SPAN, scale);
    gather(s, state, keys + TILE_BYTES);
    stage = (stage + 1) % STAGES;
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
  keep(state, (float*)(memory + warp * RING_BYTES), peaks + warp * ROWS, totals + warp * ROWS);
  __syncthreads();
  merge(memory, peaks, totals, out, r);
}
