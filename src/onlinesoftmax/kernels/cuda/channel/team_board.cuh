// The board of a team: every block posts one message about each row, and all blocks of the team read it.
//
// Messages and the loads and stores of other rows delay each other, so a board moves few bytes.  A block writes one message
// for all, not one to each block as in mailboxes.cuh.  While it waits, it looks at one word, which counts the messages about
// the row.  It reads the messages when all blocks have posted theirs, usually once.
//
// Hazard: a counted message may still be on its way, because no fence orders it.  Then its tag is that of an older row, and
// the reader looks again (docs/protocols.md, "The board of a team").
struct Board {
    Team team;
    uint64* words;   // of the team

    // 64-bit words of the messages of a team, in whole cache lines.
    static constexpr __device__ int64 message_words(int size) {
        return (SLOTS * size * int64(sizeof(TeamChannel::Sent) / 8) + LINE_WORDS - 1) / LINE_WORDS * LINE_WORDS;
    }
    // 64-bit words of the board of a team: its messages, and a cache line for each counter, those of the slots and `done`;
    // the two of `tile_counter` share a line.
    static constexpr __device__ int64 board_words(int size) { return message_words(size) + (SLOTS + 2) * LINE_WORDS; }

    __device__ inline Board(const Params& p, const Team& team)
        : team(team), words(p.mail + blockIdx.x * board_words(team.size)) {
        // L2 may have evicted the board since the last launch.  This loads the messages of two rows, and all counters.
        for (unsigned slot = 0; slot < 2; ++slot)
            for (int from = threadIdx.x; from < team.size; from += THREADS) prefetch(messages(slot)[from].at);
        if (threadIdx.x < SLOTS + 2) prefetch(line(threadIdx.x));
    }

    // The messages about a row, one from each block; `count` is the number of the row among those of the team.
    __device__ inline TeamChannel messages(unsigned count) const {
        return TeamChannel{reinterpret_cast<TeamChannel::Sent*>(words)}[int(count % SLOTS) * team.size];
    }
    __device__ inline uint64* line(int i) const { return words + message_words(team.size) + i * LINE_WORDS; }
    // Counts the blocks that have posted their messages, over all rows that use the same slot.
    __device__ inline uint64* posted(unsigned count) const { return line(int(count % SLOTS)); }
    // Counts the blocks that have received the states of all rows.
    __device__ inline uint64* done() const { return line(SLOTS); }
    // The counter of the tiles of a row, for stream.cuh.  There are two, which rows use in turn.  They are EMPTY between
    // rows.
    __device__ inline unsigned* tile_counter(unsigned count) const {
        return reinterpret_cast<unsigned*>(line(SLOTS + 1)) + count % 2;
    }

    // Posts this block's state; called by one thread.
    __device__ inline void post(const State& a, unsigned count) const {
        put_state(messages(count)[team.rank], a, count + 1);
        add_to_word(posted(count), 1);
    }
    // Looks once whether all blocks have posted their states of a row.  A counter begins at EMPTY, which is -1.
    __device__ inline bool all_have_posted(unsigned count) const {
        return look_word(posted(count)) - EMPTY >= (count / SLOTS + 1) * uint64(team.size);
    }
    // Merges the states of all blocks, which have posted them; called by a warp.
    __device__ inline State merge(unsigned count) const {
        State a;
        while (!__all_sync(~0u, receive<32, 5>(a, messages(count), team.size, count + 1, threadIdx.x % 32))) {}
        return merge_lanes<32>(a);
    }

    // Called by a warp when the block has received the states of all rows.  The last block of the team that calls it empties
    // the board, because then no block will read it again.
    __device__ inline void leave() const {
        const int lane = threadIdx.x % 32;
        const uint64 before = lane ? 0 : add_and_look(done(), 1) - EMPTY;
        if (from_lane(before, 0) != uint64(team.size - 1)) return;
        for (int i = lane; i < SLOTS * team.size; i += 32) messages(0)[i].clear();
        for (int i = lane; i < SLOTS + 1; i += 32) put_word(line(i), EMPTY);
    }
};
