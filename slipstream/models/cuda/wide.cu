// x @ weight.T for 17 to 128 rows of x, at the speed the weight can be read. See wide.py.
//
// A program owns TILE rows of the weight and a part of the inner length. One thread copies tiles of
// both matrices into a ring in shared memory (TMA); one warpgroup for each 64 rows of x multiplies
// (wgmma) and keeps its sums in registers. The SPLIT programs of a tile are a cluster: in the end
// each adds up a share of the columns, which the others send to it.
//
// The compiler's options set GROUPS (64 rows each), TILE, SPLIT, STAGES and GATED;
// WGMMA(d, a, b, accumulate) is written by wide.py for the tile.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

struct alignas(64) Map { u64 opaque[16]; };  // CUtensorMap

constexpr int BLOCK = 64;  // inner length of a tile: 128 bytes, the width of a swizzled line
constexpr int X_BYTES = 64 * GROUPS * BLOCK * 2;
constexpr int W_BYTES = TILE * BLOCK * 2;
constexpr int NUMBERS = TILE / 2;  // sums a thread
constexpr int WARPS = 4 * GROUPS;  // that multiply
constexpr int SHARE = NUMBERS / SPLIT;  // sums a thread has to do with in the end
static_assert(TILE % (8 * SPLIT) == 0, "a share is whole blocks of 8 columns");
static_assert(!GATED || SPLIT == 1, "a gate needs whole sums");
constexpr u64 READ_ONCE = 0x12F0000000000000ull, READ_OFTEN = 0x14F0000000000000ull;  // L2 hints

struct Ring {
  u32 x, w, full, empty;  // addresses in shared memory: tiles, and barriers of each stage
};

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ void fetch(u32 to, const Map& map, u32 barrier, int column, int row, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(&map), "r"(barrier),
      "r"(column), "r"(row), "l"(hint)
      : "memory");
}

// A swizzled tile whose lines of 128 bytes lie one after another, eight to a group.
__device__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ u32 pair(float low, float high) {  // two bfloat16
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ void fetch_weight(const Ring& ring, int s, const Map& weight, int column, int columns) {
  u32 to = ring.w + s * W_BYTES, barrier = ring.full + 8 * s;
  expect(barrier, X_BYTES + W_BYTES);
  if (GATED) {  // the first half of the weight's rows is the gate, the second what it lets pass
    int row = blockIdx.x * (TILE / 2);
    fetch(to, weight, barrier, column, row, READ_ONCE);
    fetch(to + W_BYTES / 2, weight, barrier, column, row + columns, READ_ONCE);
  } else {
    fetch(to, weight, barrier, column, blockIdx.x * TILE, READ_ONCE);
  }
}

__device__ void fetch_x(const Ring& ring, int s, const Map& x, int column) {
  fetch(ring.x + s * X_BYTES, x, ring.full + 8 * s, column, 0, READ_OFTEN);
}

// The weight does not depend on the kernel in front: its first tiles are asked for at once. The kernel
// behind may start when that one has ended, so it may read what that one wrote before it waits.
__device__ void produce(const Ring& ring, const Map& x, const Map& weight, int blocks, int columns) {
  int first = blockIdx.y * blocks * BLOCK, ahead = blocks < STAGES ? blocks : STAGES;
  for (int i = 0; i < ahead; i++) fetch_weight(ring, i, weight, first + i * BLOCK, columns);
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  for (int i = 0; i < ahead; i++) fetch_x(ring, i, x, first + i * BLOCK);
  for (int i = ahead; i < blocks; i++) {
    int s = i % STAGES;
    wait(ring.empty + 8 * s, (i / STAGES & 1) ^ 1);
    fetch_weight(ring, s, weight, first + i * BLOCK, columns);
    fetch_x(ring, s, x, first + i * BLOCK);
  }
}

__device__ void multiply(const Ring& ring, float (&d)[NUMBERS], int blocks) {
  u32 group = threadIdx.x / 128;
  bool speaks = threadIdx.x % 32 == 0;
  for (int i = 0; i < blocks; i++) {
    int s = i % STAGES;
    wait(ring.full + 8 * s, i / STAGES & 1);
    u64 a = descriptor(ring.x + s * X_BYTES + group * 64 * BLOCK * 2);
    u64 b = descriptor(ring.w + s * W_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++) WGMMA(d, a + 2 * k, b + 2 * k, i + k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (i > 0 && speaks) arrive(ring.empty + 8 * ((i - 1) % STAGES));
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

__device__ float gated(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

__device__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__device__ u32 rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

__device__ void send(u32 address, u32 program, float value) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.f32 [there], %2;\n}" ::"r"(address), "r"(program), "f"(value)
      : "memory");
}

// Every program gets the others' sums of its share of the columns, in the ring, which is free now.
__device__ void add_up(const float (&d)[NUMBERS], float (&sums)[SHARE], u32 ring, u32 mine) {
  constexpr int THREADS = 32 * WARPS;
  sync_cluster();  // all have read their rings
#pragma unroll
  for (int p = 0; p < SPLIT; p++) {
    u32 slot = (mine < p ? mine : mine - 1) * SHARE;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      if (p == mine) {
        sums[i] = d[p * SHARE + i];
      } else {
        send(ring + ((slot + i) * THREADS + threadIdx.x) * 4, p, d[p * SHARE + i]);
      }
    }
  }
  sync_cluster();  // all have arrived
  for (int other = 0; other < SPLIT - 1; other++) {
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      float x;
      u32 at = ring + ((other * SHARE + i) * THREADS + threadIdx.x) * 4;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
      sums[i] += x;
    }
  }
}

// A thread has two neighboring columns of two rows in every eight columns.
__device__ void store(const float (&sums)[SHARE], u16* out, int rows, int columns, int first) {
  constexpr int OWN = GATED ? SHARE / 2 : SHARE;  // of the thread's sums, what is written
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = warp * 16 + half * 8 + lane / 4;
    if (row >= rows) continue;
    u16* line = out + (long long)row * columns + first + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < OWN / 4; j++) {
      int at = 4 * j + 2 * half;
      float low = sums[at], high = sums[at + 1];
      if (GATED) {
        low = gated(low, sums[(at + SHARE / 2) % SHARE]);
        high = gated(high, sums[(at + 1 + SHARE / 2) % SHARE]);
      }
      *(u32*)(line + j * 8) = pair(low, high);
    }
  }
}

extern "C" __global__ void __cluster_dims__(1, SPLIT, 1) __launch_bounds__(32 * (WARPS + 1), 1)
    wide(const __grid_constant__ Map x, const __grid_constant__ Map weight, u16* out, int rows,
         int columns, int blocks) {
  extern __shared__ char memory[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  Ring ring;
  ring.x = (shared_address(memory) + 1023) / 1024 * 1024;
  ring.w = ring.x + STAGES * X_BYTES;
  ring.full = shared_address(barriers);
  ring.empty = ring.full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      init(ring.full + 8 * s, 1);
      init(ring.empty + 8 * s, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x / 32 == WARPS) {
    if (threadIdx.x % 32 == 0) produce(ring, x, weight, blocks, columns);
    return;
  }
  float d[NUMBERS];
  multiply(ring, d, blocks);
  constexpr int TILE_OUT = GATED ? TILE / 2 : TILE;
  if (SPLIT == 1) {
    store((const float(&)[SHARE])d, out, rows, columns, blockIdx.x * TILE_OUT);
  } else {
    float sums[SHARE];
    u32 mine = rank();
    add_up(d, sums, ring.x, mine);
    store(sums, out, rows, columns, blockIdx.x * TILE_OUT + mine * (TILE / SPLIT));
  }
}
