// The warp of a block that does nothing but exchange states with the other blocks of its team, for the kernels of strategy
// `grid` that load through a ring.

// States in shared memory, between the warps that hold rows and the warp that exchanges states.  There are two places for
// each; rows use them in turn.
struct SharedStates {
    State of_warps[2][WARPS], of_row[2];
    ACC own_score[2], score[2];     // SHARDED: of the target column, as this GPU has it, and of the whole row
    uint64 reduced[2], merged[2];   // barriers: all warps have reduced a row; the state of a row has arrived

    __device__ inline void prepare() {
        for (int i = 0; i < 2; ++i) prepare_barrier(&reduced[i], WARPS), prepare_barrier(&merged[i], 1);
    }
    // Merges the states of a warp and hands the result over.  All threads that hold rows call `post` once for each row, and
    // `wait_for_row` once for each row, in the same order.
    __device__ inline void post(
        State state, unsigned count, const RowOperands& operands, const Row& r, CallConstants call) {
        state = merge_lanes<32>(state);
        if (threadIdx.x % 32) return;
        if (SHARDED && threadIdx.x == 0) own_score[count % 2] = operands.own_score(r, call);
        of_warps[count % 2][threadIdx.x / 32] = state;
        arrive(&reduced[count % 2]);
    }
    // Waits for the state of a whole row, and returns it; sets the score of the target.
    __device__ inline State wait_for_row(unsigned count, RowOperands& operands) {
        wait_for_phase(&merged[count % 2], count / 2 % 2);
        if constexpr (SHARDED) operands.target_score = score[count % 2];
        return of_row[count % 2];
    }
};

// The warp that exchanges states.  It posts the state of a row as soon as the block has reduced the row, even while it
// waits for the row before: through a busy L2, a message takes several microseconds.  With SHARDED, the first block of the
// team merges the states of the blocks and sends the result to the other GPUs, and every block receives from all GPUs.
__device__ inline void exchange_states(const Params& p, const Board& board, SharedStates& states) {
    const int lane = threadIdx.x % 32;
    const unsigned rows = blockIdx.x < p.rows ? unsigned((p.rows - 1 - blockIdx.x) / gridDim.x) + 1 : 0;
    const auto row_of = [](unsigned count) { return blockIdx.x + int64(count) * gridDim.x; };
    const Launch launch = this_launch(p, lane);
    WaitLimit limit;
    for (unsigned sent = 0, told = 0, received = 0; received < rows;) {
        uint64* const reduced = &states.reduced[sent % 2];
        if (received == sent) wait_for_phase(reduced, sent / 2 % 2);
        if (sent < rows && __all_sync(~0u, has_ended(reduced, sent / 2 % 2))) {
            const State state = merge_lanes<32>(lane < WARPS ? states.of_warps[sent % 2][lane] : identity());
            if (lane == 0) board.post(state, sent);
            prefetch_mailboxes(p, launch, row_of(sent), lane);
            ++sent;
        }
        ShardState row;
        if constexpr (SHARDED) {
            if (board.team.rank == 0 && told < sent && __all_sync(~0u, board.all_have_posted(told))) {
                row = {board.merge(told), states.own_score[told % 2]};
                if (lane < p.processes) send_state(p, launch, row, row_of(told), lane);
                ++told;
            }
            if (!look_for_states(p, launch, row, row_of(received))) {
                limit.check(p);
                continue;
            }
            limit = {};
        } else {
            if (!__all_sync(~0u, board.all_have_posted(received))) continue;
            row.state = board.merge(received);
        }
        if (lane == 0) {
            states.of_row[received % 2] = row.state;
            if constexpr (SHARDED) states.score[received % 2] = row.target_score;
            arrive(&states.merged[received % 2]);
        }
        ++received;
    }
    board.leave();
}
