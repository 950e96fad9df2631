// How warps meet. Racecheck follows neither an arrival for other threads nor named barriers of several
// warpgroups: with CHECKED, which is for it alone, every thread arrives by itself on barriers in memory.

#ifdef CHECKED
#define ARRIVALS 32        // of a warp
#define MEETING_BYTES 128  // barriers in place of named ones
DEVICE u32 meeting(u32 id) { return SHARED_BASE + AT_MEETING + id * 8; }
DEVICE void init_meeting(u32 id, u32 threads) { barrier_init(meeting(id), threads); }
DEVICE void meet(u32 id, u32) {
  u64 token = barrier_token(meeting(id));
  while (!barrier_passed(meeting(id), token)) {
  }
}
DEVICE void meet_apart(u32 id, u32 threads) { meet(id, threads); }
#else
#define ARRIVALS 1
#define MEETING_BYTES 0
DEVICE void init_meeting(u32, u32) {}
DEVICE void meet(u32 id, u32 threads) { sync_named(id, threads); }
DEVICE void meet_apart(u32 id, u32 threads) { sync_apart(id, threads); }  // from several places in the program
#endif

// One lane arrives for its warp, after __syncwarp.
DEVICE void warp_arrives(u32 bar, u32 lane) { barrier_arrive(bar, ARRIVALS == 32 || lane == 0); }
