/* The tree of events: their order, the innermost event open when another starts, and the time that no event inside
 * covers. The same as `nest` of assemble.py without this.
 */
#ifndef STEPSCOPE_NEST_H
#define STEPSCOPE_NEST_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The columns of events. No event ends before it starts, or 2^63 and more after. */
typedef struct {
    const uint32_t *threads, *events;
    const int64_t *starts, *lengths;
    size_t num;
} Rows;

/* -- Their order: by thread, start, length (the longest first) and place in the file ---------------------------------- */

static inline bool is_before(const Rows *rows, uint32_t a, uint32_t b) {
    if (rows->threads[a] != rows->threads[b])
        return rows->threads[a] < rows->threads[b];
    if (rows->starts[a] != rows->starts[b])
        return rows->starts[a] < rows->starts[b];
    if (rows->lengths[a] != rows->lengths[b])
        return rows->lengths[a] > rows->lengths[b];
    return rows->events[a] < rows->events[b];
}

/* Sorts `num` rows; `room` is for half of them. Profilers write long runs in order, which stay where they are. */
static void sort_rows(const Rows *rows, uint32_t *order, size_t num, uint32_t *room) {
    if (num <= 12) {
        for (size_t i = 1; i < num; i++) {
            uint32_t row = order[i];
            size_t j = i;
            for (; j && is_before(rows, row, order[j - 1]); j--)
                order[j] = order[j - 1];
            order[j] = row;
        }
        return;
    }
    size_t half = num / 2, left = 0, right = half, to;
    sort_rows(rows, order, half, room);
    sort_rows(rows, order + half, num - half, room);
    if (!is_before(rows, order[half], order[half - 1]))
        return;
    for (size_t end = half; left < end;) { /* what is first stays; the last of the left half does not */
        size_t middle = left + (end - left) / 2;
        if (is_before(rows, order[half], order[middle]))
            end = middle;
        else
            left = middle + 1;
    }
    memcpy(room, order + left, (half - left) * sizeof *room);
    size_t num_left = half - left, i = 0;
    for (to = left; i < num_left && right < num; to++)
        order[to] = is_before(rows, order[right], room[i]) ? order[right++] : room[i++];
    memcpy(order + to, room + i, (num_left - i) * sizeof *room);
}

/* -- Their tree ------------------------------------------------------------------------------------------------------ */

typedef struct {
    uint32_t row;
    int64_t end;
} Open;

typedef struct {
    Open *opens;
    size_t num, room;
} Stack;

typedef struct {
    uint32_t *parents;
    uint8_t *has_parent; /* a bit for each row */
    uint64_t *own; /* Sums may be larger than 63 bits if clocks are broken: they wrap around like those of Polars. */
    size_t num_parents;
    Stack stack;
} Nest;

static bool push(Stack *stack, uint32_t row, int64_t end) {
    if (stack->num == stack->room) {
        size_t room = stack->room ? 2 * stack->room : 64;
        Open *larger = realloc(stack->opens, room * sizeof *larger);
        if (!larger)
            return false;
        stack->opens = larger;
        stack->room = room;
    }
    stack->opens[stack->num++] = (Open){row, end};
    return true;
}

static inline int64_t end_of(const Rows *rows, size_t row) {
    return (int64_t)((uint64_t)rows->starts[row] + (uint64_t)rows->lengths[row]);
}

/* Gives the time up to a moment to the innermost open events; without a moment all time there is. */
static void advance(Nest *nest, int64_t *now, bool is_all, int64_t until) {
    Stack *stack = &nest->stack;
    while (stack->num && (is_all || *now < until)) {
        Open last = stack->opens[stack->num - 1];
        int64_t stop = is_all || last.end < until ? last.end : until;
        if (stop > *now) {
            nest->own[last.row] += (uint64_t)(stop - *now);
            *now = stop;
        }
        if (last.end <= *now)
            stack->num--;
    }
}

/* The time of each row if events overlap in part: each moment belongs to the last started event still open. */
static bool sweep_rows(Nest *nest, const Rows *rows) {
    int64_t now = 0;
    nest->stack.num = 0;
    memset(nest->own, 0, rows->num * sizeof *nest->own);
    for (size_t i = 0; i < rows->num; i++) {
        advance(nest, &now, i == 0 || rows->threads[i] != rows->threads[i - 1], rows->starts[i]);
        now = rows->starts[i];
        if (!push(&nest->stack, (uint32_t)i, end_of(rows, i)))
            return false;
    }
    advance(nest, &now, true, 0);
    return true;
}

/* Finds parents and own times of sorted rows; false if there is no memory. */
static bool nest_rows(Nest *nest, const Rows *rows) {
    nest->parents = malloc(rows->num * sizeof *nest->parents + 1);
    nest->has_parent = calloc(rows->num / 8 + 1, 1);
    nest->own = malloc(rows->num * sizeof *nest->own + 1);
    if (!nest->parents || !nest->has_parent || !nest->own)
        return false;
    Stack *stack = &nest->stack;
    bool has_overhang = false;
    for (size_t i = 0; i < rows->num; i++) {
        int64_t end = end_of(rows, i);
        if (i && rows->threads[i] != rows->threads[i - 1])
            stack->num = 0;
        while (stack->num && stack->opens[stack->num - 1].end <= rows->starts[i])
            stack->num--;
        nest->parents[i] = 0;
        nest->own[i] = (uint64_t)rows->lengths[i];
        if (stack->num) {
            Open parent = stack->opens[stack->num - 1];
            nest->parents[i] = parent.row;
            nest->has_parent[i / 8] |= (uint8_t)(1u << i % 8);
            nest->num_parents++;
            nest->own[parent.row] -= (uint64_t)rows->lengths[i];
            has_overhang |= end > parent.end;
        }
        if (end > rows->starts[i] && !push(stack, (uint32_t)i, end))
            return false;
    }
    return !has_overhang || sweep_rows(nest, rows);
}

#endif
