/* The bookkeeping of a step, request by request: its rows, the verdict on greedy drafts, what is committed, what waits.
   Functions that give a number say 0, or 1 where one points outside of what there is; then nothing was written. */
#include "common.h"

/* Columns of a slot and faults of a row, as `slot_columns.py` and `finalise_block.py` number them. */
enum { LENGTH, ANCHOR, STEP, IS_ALIVE, LIMIT, TOP_K, SEED, FIRST_STOP, NUM_WHOLE = FIRST_STOP + 8 };
enum { TEMPERATURE, TOP_P, MIN_P, NUM_FRACTIONS };
enum { SOUND, NOT_A_NUMBER, NOTHING_LEFT };
enum { NO_TOKEN = -1, FIRST_CELL = 1 };

#define AT_ONCE 4

ALWAYS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

ALWAYS_INLINE int64_t within(int64_t x, int64_t lowest, int64_t highest) {
    return x < lowest ? lowest : least(x, highest);
}

/* As an index of torch: those below 0 count from the end. */
ALWAYS_INLINE int64_t place_of(int64_t slot, int64_t num_slots) { return slot < 0 ? slot + num_slots : slot; }

static int32_t are_slots(const int64_t *slots, int64_t num_requests, int64_t num_slots) {
    for (int64_t b = 0; b < num_requests; b++) if (slots[b] < -num_slots || slots[b] >= num_slots) return 0;
    return 1;
}

/* The physical row of a position that is none below 0. */
ALWAYS_INLINE int64_t cell_of(const int32_t *blocks, int64_t num_blocks, int64_t block_size, int64_t position) {
    int64_t block = position / block_size < num_blocks ? blocks[position / block_size] : 0;
    int64_t cell = block * block_size + position % block_size;
    return cell < FIRST_CELL ? FIRST_CELL : cell;
}

/* `table_rows`. */
int32_t paceline_table_rows(
    const int32_t *table, const int64_t *slots, const int64_t *starts, int64_t *cells, int64_t num_requests,
    int64_t num_slots, int64_t num_blocks, int64_t block_size, int64_t num_rows) {
    if (!are_slots(slots, num_requests, num_slots)) return 1;
    for (int64_t b = 0; b < num_requests; b++) if (starts[b] < 0) return 1;
    for (int64_t b = 0; b < num_requests; b++) {
        const int32_t *blocks = table + place_of(slots[b], num_slots) * num_blocks;
        for (int64_t row = 0; row < num_rows; row++)
            cells[b * num_rows + row] = cell_of(blocks, num_blocks, block_size, starts[b] + row);
    }
    return 0;
}

/* `step_rows`. The 8 columns of `whole_out` and the 3 of `fractions_out` hold one number per request. */
int32_t paceline_step_rows(
    const int64_t *slots, const int64_t *context_starts, const int64_t *whole, const float *fractions,
    const int64_t *kept, const int64_t *kept_candidates, const float *kept_log_q, const int32_t *table,
    int64_t *whole_out, float *fractions_out, int64_t *tokens, int64_t *positions, int64_t *cells, int64_t *drafts,
    int64_t *candidates, float *log_q, int64_t num_requests, int64_t num_slots, int64_t num_kept, int64_t num_drafts,
    int64_t num_candidates, int64_t num_blocks, int64_t block_size, int64_t vocab_size, int64_t num_positions) {
    if (!are_slots(slots, num_requests, num_slots)) return 1;
    for (int64_t b = 0; b < num_requests; b++) {
        const int64_t *own = whole + place_of(slots[b], num_slots) * NUM_WHOLE;
        int64_t is_alive = own[IS_ALIVE] > 0, position = is_alive ? own[LENGTH] : -1;
        int64_t start = position < 0 ? 0 : position, slot = is_alive ? slots[b] : num_slots - 1;
        int64_t *out = whole_out + b;
        out[0] = slot;
        slot = place_of(slot, num_slots);
        own = whole + slot * NUM_WHOLE;
        out[num_requests] = start;
        out[2 * num_requests] = position;
        out[3 * num_requests] = own[ANCHOR];
        out[4 * num_requests] = own[STEP];
        out[5 * num_requests] = own[TOP_K];
        out[6 * num_requests] = own[SEED];
        if (context_starts) out[7 * num_requests] = least(context_starts[b], start);
        for (int64_t column = 0; column < NUM_FRACTIONS; column++)
            fractions_out[column * num_requests + b] = fractions[slot * NUM_FRACTIONS + column];

        int64_t anchor = within(own[ANCHOR], 0, vocab_size - 1), first = b * (num_drafts + 1);
        for (int64_t row = 0; row <= num_drafts; row++) {
            int64_t at = start + row, draft = NO_TOKEN;
            if (row > 0) {
                draft = kept[slot * num_kept + row - 1];
                if (draft >= vocab_size) draft = NO_TOKEN;
                drafts[b * num_drafts + row - 1] = draft;
            }
            tokens[first + row] = draft < 0 ? anchor : draft;
            positions[first + row] = least(at, num_positions - 1);
            if (table) cells[first + row] = cell_of(table + slot * num_blocks, num_blocks, block_size, at);
        }
        /* The first drafts of a slot lie side by side. */
        int64_t from = slot * num_kept * num_candidates, each = num_drafts * num_candidates;
        for (int64_t i = 0; i < each; i++) {
            int64_t id = kept_candidates[from + i];
            candidates[b * each + i] = id >= vocab_size ? NO_TOKEN : id;
            log_q[b * each + i] = kept_log_q[from + i];
        }
    }
    return 0;
}

/* `block_rows`. The 4 columns of `whole_out` hold one number per request. */
int32_t paceline_block_rows(
    const int64_t *slots, const int64_t *whole, const float *fractions, int64_t *whole_out, float *temperature,
    int64_t *tokens, int64_t *positions, uint8_t *is_beyond, int64_t num_requests, int64_t num_slots, int64_t num_rows,
    int64_t mask_id, int64_t vocab_size, int64_t max_positions) {
    if (!are_slots(slots, num_requests, num_slots)) return 1;
    for (int64_t b = 0; b < num_requests; b++) {
        int64_t slot = place_of(slots[b], num_slots), *out = whole_out + b;
        const int64_t *own = whole + slot * NUM_WHOLE;
        int64_t length = own[LENGTH], anchor = within(own[ANCHOR], 0, vocab_size - 1);
        out[0] = length;
        out[num_requests] = anchor;
        out[2 * num_requests] = own[STEP];
        out[3 * num_requests] = own[SEED];
        temperature[b] = fractions[slot * NUM_FRACTIONS + TEMPERATURE];
        is_beyond[b] = length + num_rows > max_positions;
        for (int64_t row = 0; row < num_rows; row++) {
            tokens[b * num_rows + row] = row ? mask_id : anchor;
            positions[b * num_rows + row] = least(length + row, max_positions - 1);
        }
    }
    return 0;
}

ALWAYS_INLINE __m512 load_scores(const void *row, int64_t at, __mmask16 lanes, int32_t are_halves) {
    return are_halves ? load_wide((const bfloat *)row + at, lanes)
                      : _mm512_maskz_loadu_ps(lanes, (const float *)row + at);
}

/* Where the largest score of a row stands first; *fault says whether it may be chosen. The largest is found in several
   registers that wait for none of each other, then looked for: keeping track of its place would take thrice as long. */
ALWAYS_INLINE int64_t best_of_row(const void *row, int64_t width, int32_t are_halves, int64_t *fault) {
    __m512 best[AT_ONCE];
    __mmask16 is_nan = 0;
    int64_t at = 0;
    for (int64_t i = 0; i < AT_ONCE; i++) best[i] = _mm512_set1_ps(-INFINITY);
    for (; at + AT_ONCE * LANES <= width; at += AT_ONCE * LANES)
        for (int64_t i = 0; i < AT_ONCE; i++) {
            __m512 here = load_scores(row, at + i * LANES, 0xFFFF, are_halves);
            is_nan |= _mm512_cmp_ps_mask(here, here, _CMP_UNORD_Q);
            best[i] = _mm512_max_ps(here, best[i]);
        }
    for (; at < width; at += LANES) {
        __mmask16 lanes = first_lanes(width - at);
        __m512 here = load_scores(row, at, lanes, are_halves);
        is_nan |= _mm512_mask_cmp_ps_mask(lanes, here, here, _CMP_UNORD_Q);
        best[0] = _mm512_mask_max_ps(best[0], lanes, here, best[0]);
    }
    for (int64_t i = 1; i < AT_ONCE; i++) best[0] = _mm512_max_ps(best[0], best[i]);
    float largest = _mm512_reduce_max_ps(best[0]);
    *fault = is_nan || largest == INFINITY ? NOT_A_NUMBER : largest == -INFINITY ? NOTHING_LEFT : SOUND;
    if (*fault != SOUND) return NO_TOKEN;
    for (at = 0;; at += LANES) {
        __mmask16 lanes = first_lanes(width - at);
        __m512 here = load_scores(row, at, lanes, are_halves);
        __mmask16 is_best = _mm512_mask_cmp_ps_mask(lanes, here, _mm512_set1_ps(largest), _CMP_EQ_OQ);
        if (is_best) return at + __builtin_ctz(is_best);
    }
}

/* Drafts that are their rows' best, up to the first that is not; rows behind it are not looked at. */
ALWAYS_INLINE void judge(
    const int64_t *drafts, const char *scores, int64_t row_bytes, int64_t width, int64_t num_drafts,
    int32_t are_halves, int64_t *verdict, int64_t num_requests) {
    for (int64_t row = 0;; row++) {
        int64_t fault, chosen = best_of_row(scores + row * row_bytes, width, are_halves, &fault);
        if (row < num_drafts && fault == SOUND && drafts[row] == chosen) continue;
        verdict[0] = row;
        verdict[num_requests] = chosen;
        verdict[2 * num_requests] = fault;
        verdict[3 * num_requests] = 0;
        return;
    }
}

/* `verify_greedily`: scores are float32 or bf16; strides in bytes. The 4 columns of `verdict` hold one number per
   request. */
void paceline_verify_greedily(
    const int64_t *drafts, const char *scores, int64_t request_bytes, int64_t row_bytes, int32_t are_halves,
    int64_t *verdict, int64_t num_requests, int64_t num_drafts, int64_t width, int32_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_requests > 1)
    for (int64_t b = 0; b < num_requests; b++) {
        const int64_t *own = drafts + b * num_drafts;
        if (are_halves)
            judge(own, scores + b * request_bytes, row_bytes, width, num_drafts, 1, verdict + b, num_requests);
        else
            judge(own, scores + b * request_bytes, row_bytes, width, num_drafts, 0, verdict + b, num_requests);
    }
}

/* `commit_step`. `ends` has three columns with one number per request, of which the last two are scratch: a slot that
   stands here several times is read before it is written, and the last request decides. */
int32_t paceline_commit_step(
    int64_t *whole, int64_t *waiting, const int64_t *slots, const int64_t *starts, const int64_t *positions,
    const int64_t *drafts, const int64_t *accepted, const int64_t *bonus, const int64_t *faults,
    const int64_t *num_zero_q, int64_t *ends, int64_t *report, int64_t num_requests, int64_t num_slots,
    int64_t num_kept, int64_t num_drafts) {
    if (!are_slots(slots, num_requests, num_slots)) return 1;
    for (int64_t b = 0; b < num_requests; b++) if (accepted[b] < 0 || accepted[b] > num_drafts) return 1;
    int64_t *steps = ends + num_requests, *alive = steps + num_requests;
    for (int64_t b = 0; b < num_requests; b++) {
        const int64_t *own = whole + place_of(slots[b], num_slots) * NUM_WHOLE;
        int64_t end = starts[b] + accepted[b] + 1, goes_on = end < own[LIMIT] && faults[b] == SOUND;
        *report++ = accepted[b];
        *report++ = faults[b];
        *report++ = num_zero_q[b];
        *report++ = 0; /* drafts that wait */
        *report++ = positions[b];
        for (int64_t row = 0; row <= num_drafts; row++) {
            int64_t is_draft = row < accepted[b], is_behind = row > accepted[b];
            int64_t token = is_behind ? NO_TOKEN : is_draft ? drafts[b * num_drafts + row] : bonus[b];
            *report++ = token;
            for (int64_t at = FIRST_STOP; at < NUM_WHOLE; at++) goes_on &= token == NO_TOKEN || token != own[at];
        }
        for (int64_t k = 0; k < num_drafts; k++) *report++ = drafts[b * num_drafts + k];
        ends[b] = end;
        steps[b] = own[STEP] + 1;
        alive[b] = goes_on ? own[IS_ALIVE] : 0;
    }
    for (int64_t b = 0; b < num_requests; b++) {
        int64_t slot = place_of(slots[b], num_slots), *own = whole + slot * NUM_WHOLE;
        own[LENGTH] = ends[b];
        own[ANCHOR] = bonus[b];
        own[STEP] = steps[b];
        own[IS_ALIVE] = alive[b];
        for (int64_t k = 0; k < num_kept; k++) waiting[slot * num_kept + k] = NO_TOKEN;
    }
    return 0;
}

/* `store_drafts`. No candidates are kept where `kept_candidates` is NULL; without q drafts are one-hot. */
int32_t paceline_store_drafts(
    const int64_t *slots, const int64_t *ids, const int64_t *candidates, const float *log_q, int32_t has_q,
    const int64_t *wanted, int64_t *kept, int64_t *kept_candidates, float *kept_log_q, int64_t *waiting,
    int64_t waiting_stride, int64_t num_requests, int64_t num_slots, int64_t num_kept, int64_t num_drafts,
    int64_t num_candidates) {
    if (!are_slots(slots, num_requests, num_slots)) return 1;
    for (int64_t b = 0; b < num_requests; b++) {
        int64_t slot = place_of(slots[b], num_slots), *own = kept + slot * num_kept, num_waiting = 0;
        for (int64_t k = 0; k < num_kept; k++) {
            own[k] = k < num_drafts && (!wanted || k < wanted[b]) ? ids[b * num_drafts + k] : NO_TOKEN;
            if (own[k] != NO_TOKEN && num_waiting == k) num_waiting++;
        }
        waiting[b * waiting_stride] = num_waiting;
        if (!kept_candidates) continue;
        int64_t each = num_drafts * num_candidates, first = slot * num_kept * num_candidates;
        if (has_q && !each) continue;
        if (has_q) {
            memcpy(kept_candidates + first, candidates + b * each, each * sizeof *candidates);
            memcpy(kept_log_q + first, log_q + b * each, each * sizeof *log_q);
            continue;
        }
        for (int64_t i = 0; i < num_kept * num_candidates; i++) {
            int64_t k = i / num_candidates, is_draft = k < num_drafts && i % num_candidates == 0;
            kept_candidates[first + i] = is_draft ? own[k] : NO_TOKEN;
            kept_log_q[first + i] = is_draft ? 0.0f : -INFINITY;
        }
    }
    return 0;
}
