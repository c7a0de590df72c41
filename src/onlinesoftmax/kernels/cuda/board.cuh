// The board of a team: in each slot, every block posts one message, and all blocks of the team read it.
//
// While a block waits, it looks at one word, which counts the messages in the slot, and reads them only when all have been
// posted.  If all blocks looked at all messages again and again, or had a message from every block to every block as in
// mailboxes.cuh, this traffic would delay the loads and stores of rows, and rows would delay the messages.
//
// Nothing orders a message and its count, since a fence would wait for all stores of the block to reach L2.  So the count may
// come first; then the tag of the message is still old, and the reader looks again.
struct Board {
    Team team;
    uint64* words;   // of the team

    // 64-bit words of the messages of a team, in whole cache lines.
    static constexpr __device__ int64 message_words(int size) {
        return (SLOTS * size * int64(sizeof(Message) / 8) + LINE_WORDS - 1) / LINE_WORDS * LINE_WORDS;
    }
    // 64-bit words of the board of a team: its messages; a line for the count of each slot; one for `done`, and one for
    // `tile_counter`.
    static constexpr __device__ int64 board_words(int size) { return message_words(size) + (SLOTS + 2) * LINE_WORDS; }

    __device__ inline Board(const Params& p, const Team& team)
        : team(team), words(p.mail + blockIdx.x * board_words(team.size)) {
        // L2 may have evicted the board since the last launch.  This loads the messages of the first two rows, and all counts.
        for (unsigned slot = 0; slot < 2; ++slot)
            for (int from = threadIdx.x; from < team.size; from += THREADS) prefetch(messages(slot) + from);
        if (threadIdx.x < SLOTS + 2) prefetch(line(threadIdx.x));
    }

    // The messages of all blocks about a row; `count` is the number of the row among those of the team.
    __device__ inline Message* messages(unsigned count) const {
        return reinterpret_cast<Message*>(words) + int(count % SLOTS) * team.size;
    }
    __device__ inline uint64* line(int i) const { return words + message_words(team.size) + i * LINE_WORDS; }
    __device__ inline uint64* posted(unsigned count) const { return line(int(count % SLOTS)); }
    // Counts the blocks that have received all rows.
    __device__ inline uint64* done() const { return line(SLOTS); }
    // The counter of the tiles of a row, for stream.cuh.  There are two, which rows use in turn; they are EMPTY between rows.
    __device__ inline unsigned* tile_counter(unsigned count) const {
        return reinterpret_cast<unsigned*>(line(SLOTS + 1)) + count % 2;
    }

    // Posts this block's state; called by one thread.
    __device__ inline void post(const State& a, unsigned count) const {
        put_message(messages(count) + team.rank, a, count + 1);
        add_to_word(posted(count), 1);
    }
    // Looks once whether all blocks have posted their states of a row.  A count begins at EMPTY, which is -1.
    __device__ inline bool all_have_posted(unsigned count) const {
        return look_word(posted(count)) - EMPTY >= (count / SLOTS + 1) * uint64(team.size);
    }
    // Merges the states of all blocks, which have posted them; called by a warp.
    __device__ inline State merge(unsigned count) const {
        State a;
        while (!__all_sync(~0u, receive<32, 5>(a, messages(count), team.size, count + 1, threadIdx.x % 32))) {}
        return merge_lanes<32>(a);
    }

    // Called by a warp when the block has received all rows.  The last block of the team to do so empties the board.
    __device__ inline void leave() const {
        const int lane = threadIdx.x % 32;
        const uint64 before = lane ? 0 : add_and_look(done(), 1) - EMPTY;
        if (from_lane(before, 0) != uint64(team.size - 1)) return;
        for (int i = lane; i < SLOTS * team.size; i += 32) remove_message(messages(0) + i);
        for (int i = lane; i < SLOTS + 1; i += 32) put_word(line(i), EMPTY);
    }
};
