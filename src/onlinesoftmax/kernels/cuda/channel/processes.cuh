// Messages between the GPUs that share rows: each holds a part of the columns of every row, its shard.
//
// The kernels of all GPUs run at the same time.  For each row, a GPU sends the state of its shard to every GPU, itself
// included, by stores to a mailbox in the memory of the receiver.  A receiver looks only at its own memory.  All GPUs merge
// the same states in the same order, so the state of the whole row has the same bits everywhere.
//
// The tag of a message is that of the launch.  Successive launches use two sets of mailboxes in turn.
//
// Hazard: a block must send its rows in the order of their numbers, and send a row before it waits for it, or GPUs could wait
// for each other for ever (docs/protocols.md, "The mailboxes of processes").

constexpr int SCORE_WORDS = HAS_TARGET ? ACC_WORDS : 0;

// The content of a message about a row: the state of the sender's shard, and the score of the target column, which is -inf if
// that column is on another GPU.
struct ShardState {
    State state;
    ACC target_score;
};

using ProcessChannel = Channel<TaggedWord, STATE_WORDS + SCORE_WORDS>;

// Nanoseconds since some moment.
__device__ inline uint64 now() {
    uint64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time) :: "memory");
    return time;
}

// The driver's function behind `assert`: prints the message and ends the kernel; the process can then use this GPU no more.
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, decltype(sizeof(0)));
__device__ __noinline__ void fail() {
    __assertfail("another process has ended, or did not make the same call within the timeout of the process group",
                 "onlinesoftmax", 0, "wait for other GPUs", 1);
}

// Ends the kernel when a thread has waited too long.  A thread calls `check` after each look that has found nothing.
struct WaitLimit {
    uint64 end = 0;   // 0 before the clock is read
    unsigned looks = 0;
    __device__ inline void check(const Params& p) {
        // The clock is read seldom, because messages mostly come after a few looks.
        if (++looks % 256) return;
        const uint64 time = now();
        if (end == 0) end = time + uint64(p.timeout);
        else if (time > end) {
            fail();
            // `fail` does not return, so the compiler need not save registers for the time after it.
            __builtin_unreachable();
        }
    }
};

// A launch among those that exchange states with other GPUs.  All GPUs make the same launches in the same order, so they
// number them alike.
struct Launch {
    unsigned number;

    // No tag is 0, which an empty mailbox has.  After 2^31 launches the tags begin again.
    __device__ inline unsigned tag() const { return number | 1u << 31; }
    // The mailbox for the message of process `from` about a row, in the memory of process `in`.
    __device__ inline ProcessChannel channel(const Params& p, int in, int64 row, int from) const {
        uint64* const at = p.shard_mail[in] + number % SETS * p.set_words
            + (row * int(p.processes) + from) * ProcessChannel::Sent::UNITS;
        return {reinterpret_cast<ProcessChannel::Sent*>(at)};
    }
};

// The number of this launch: the host's number, plus the number of replays of graphs (docs/protocols.md, "Numbers of
// launches").  Both stand behind the mailboxes in COPIES copies, because warps that read one address wait for each other.
// `lane` counts the threads of the block that call this, at least COPIES.
__device__ inline Launch this_launch(const Params& p, int lane) {
    static_assert(COPIES <= 32, "a warp stores all copies");
    if constexpr (!SHARDED || !REDUCES) return {};
    int64* const copies = reinterpret_cast<int64*>(p.shard_mail[p.process] + SETS * p.set_words);
    const int64* const launches = copies + (blockIdx.x + blockIdx.y) % COPIES * LINE_WORDS;
    const int64 by_host = p.number ? p.number : launches[0] + 1, by_replays = launches[1];
    if (p.number && blockIdx.x + blockIdx.y == 0 && lane < COPIES) copies[lane * LINE_WORDS] = p.number;
    return {unsigned(by_host + by_replays)};
}

// Prefetches the mailboxes of a row into L2, because L2 may have evicted them since the last launch.  Without the prefetch,
// the first look reads device memory.  A strategy calls this after it has issued the loads of the row; `lane` is the number
// of a thread among those that hold the row.
__device__ inline void prefetch_mailboxes(const Params& p, Launch launch, int64 row, int lane) {
    if constexpr (SHARDED && REDUCES)
        if (row < p.rows && lane < p.processes) prefetch(launch.channel(p, int(p.process), row, lane).at);
}

// Sends the state of this shard to process `to`.
__device__ inline void send_state(const Params& p, Launch launch, const ShardState& own, int64 row, int to) {
    ProcessChannel::Sent sent;
    set_state(sent, own.state);
    if constexpr (HAS_TARGET) sent.set(STATE_WORDS, own.target_score);
    launch.channel(p, to, row, int(p.process)).put(sent, launch.tag());
}

// Looks once at the message of a process.  Returns true if all of it has come; `found` is then its content.
__device__ inline bool look_for_state(const Params& p, Launch launch, ShardState& found, int64 row, int from) {
    ProcessChannel::Sent sent = launch.channel(p, int(p.process), row, from).look();
    if (ProcessChannel::status(sent, launch.tag()) == Status::PENDING) return false;
    found.state = state_in(sent);
    if constexpr (HAS_TARGET) sent.get(STATE_WORDS, found.target_score);
    return true;
}

// Merges the states of all processes.  In each group of WIDTH lanes, lane i has received the state of process i, and the
// other lanes have the identity, which changes nothing.  So every WIDTH gives the same bits.
template <int WIDTH> __device__ inline ShardState merge_processes(const ShardState& found) {
    ShardState whole{merge_lanes<WIDTH>(found.state), found.target_score};
    if constexpr (HAS_TARGET) whole.target_score = lane_max<WIDTH>(found.target_score);
    return whole;
}

// Looks once whether the states of all processes have come; called by a warp.  If they have, `whole` is their merged state.
__device__ inline bool look_for_states(const Params& p, Launch launch, ShardState& whole, int64 row) {
    const int lane = threadIdx.x % 32;
    ShardState found{identity(), -INF};
    const bool come = lane >= p.processes || look_for_state(p, launch, found, row, lane);
    if (!__all_sync(~0u, come)) return false;
    whole = merge_processes<32>(found);
    return true;
}

// Merges the state of this GPU's columns with those of the other GPUs, returns the state of the whole row, and stores the
// score of the target in `operands`.  LANES threads hold the row, and `lane` is the number of this thread among them.  If
// `sends` is true, the first p.processes of them each send to one process.  All threads of a warp call this, and each warp
// receives all messages.
template <int LANES> __device__ inline State complete_row(
    const Params& p, Launch launch, const Row& r, RowOperands& operands, CallConstants call, State state, int64 row,
    int lane, bool sends = true) {
    if constexpr (!SHARDED || !REDUCES) return state;
    constexpr int WIDTH = LANES < 32 ? LANES : 32;
    static_assert(!SHARDED || WIDTH >= MOST_PROCESSES, "a lane receives the state of one process");
    const bool exists = row < p.rows;
    if (exists && sends && lane < p.processes) send_state(p, launch, {state, operands.own_score(r, call)}, row, lane);
    const int from = lane % WIDTH;
    ShardState found{identity(), -INF};
    bool come = !exists || from >= p.processes;
    for (WaitLimit limit;;) {
        come = come || look_for_state(p, launch, found, row, from);
        if (__all_sync(~0u, come)) break;
        limit.check(p);
    }
    const ShardState whole = merge_processes<WIDTH>(found);
    operands.target_score = whole.target_score;
    return whole.state;
}
