// One lane arrives on a barrier for its warp, after __syncwarp. A race checker follows every thread by
// itself: for it, with EVERY_LANE, all lanes arrive.
#ifdef EVERY_LANE
#define ARRIVALS 32  // of a warp
#else
#define ARRIVALS 1
#endif
DEVICE void warp_arrives(u32 bar, u32 lane) { barrier_arrive(bar, ARRIVALS == 32 || lane == 0); }
