// Mailboxes: about each row, every block of a team sends a message to each block, and looks at all messages to itself until
// they have come.
struct Mailboxes {
    Team team;
    TeamChannel boxes;   // of the team

    __device__ inline Mailboxes(const Params& p, const Team& team)
        : team(team),
          boxes(TeamChannel{reinterpret_cast<TeamChannel::Sent*>(p.mail)}[int64(blockIdx.x) * (SLOTS * team.size * team.size)]) {
        // L2 may have evicted the mailboxes since the last launch.  This loads those of the first two rows.
        for (unsigned slot = 0; REDUCES && team.size > 1 && slot < 2; ++slot)
            for (int from = threadIdx.x; from < team.size; from += THREADS) prefetch(messages_to(team.rank, slot)[from].at);
    }

    // The messages of all blocks to block `to`; `count` is the number of a row among those of the team.
    __device__ inline TeamChannel messages_to(int to, unsigned count) const {
        return boxes[(int(count % SLOTS) * team.size + to) * team.size];
    }

    // Sends this block's state to all blocks, and merges the states of all blocks.
    __device__ inline State merge(State a, unsigned count, State* warp_states) const {
        for (int to = threadIdx.x; to < team.size; to += THREADS)
            put_state(messages_to(to, count)[team.rank], a, count + 1);
        while (!receive<THREADS, 1>(a, messages_to(team.rank, count), team.size, count + 1, threadIdx.x)) {}
        return merge_warps<THREADS / 32>(merge_lanes<32>(a), warp_states);
    }

    // Empties this block's mailboxes after its last row.
    __device__ inline void clear(unsigned rows) const {
        for (unsigned slot = 0; slot < min(rows, unsigned(SLOTS)); ++slot)
            for (int from = threadIdx.x; from < team.size; from += THREADS)
                messages_to(team.rank, slot)[from].clear();
    }
};
