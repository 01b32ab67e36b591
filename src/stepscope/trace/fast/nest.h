/* The tree of events: the innermost event open when another starts, and the time that no event inside covers.
 *
 * The same as `nest` of assemble.py without this, in one pass over events sorted by thread, start and length.
 */
#ifndef STEPSCOPE_NEST_H
#define STEPSCOPE_NEST_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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
    uint64_t *covered; /* the time of a row's children. Sums may be larger than 63 bits if clocks are broken: they wrap around like those of Polars */
    int64_t *swept; /* the time that is a row's own if events overlap in part */
    size_t num_rows, room, num_parents;
    Stack tree, sweep;
    uint32_t thread;
    int64_t now;
    bool has_overhang, is_short_of_memory;
} Nest;

static bool push(Nest *nest, Stack *stack, uint32_t row, int64_t end) {
    if (stack->num == stack->room) {
        size_t room = stack->room ? 2 * stack->room : 64;
        Open *larger = realloc(stack->opens, room * sizeof *larger);
        if (!larger) {
            nest->is_short_of_memory = true;
            return false;
        }
        stack->opens = larger;
        stack->room = room;
    }
    stack->opens[stack->num++] = (Open){row, end};
    return true;
}

static bool make_room(Nest *nest, size_t num_more) {
    size_t room = nest->num_rows + num_more;
    if (room < num_more || room >= UINT32_MAX)
        return false;
    uint32_t *parents = realloc(nest->parents, room * sizeof *parents + 1);
    nest->parents = parents ? parents : nest->parents;
    uint8_t *bits = realloc(nest->has_parent, room / 8 + 1);
    nest->has_parent = bits ? bits : nest->has_parent;
    uint64_t *covered = realloc(nest->covered, room * sizeof *covered + 1);
    nest->covered = covered ? covered : nest->covered;
    int64_t *swept = realloc(nest->swept, room * sizeof *swept + 1);
    nest->swept = swept ? swept : nest->swept;
    if (!parents || !bits || !covered || !swept)
        return false;
    size_t known = (nest->num_rows + 7) / 8;
    memset(bits + known, 0, room / 8 + 1 - known);
    memset(covered + nest->num_rows, 0, num_more * sizeof *covered);
    memset(swept + nest->num_rows, 0, num_more * sizeof *swept);
    nest->room = room;
    return true;
}

/* Gives the time up to a moment to the innermost open events; without a moment all time there is. */
static void advance(Nest *nest, bool is_all, int64_t until) {
    Stack *stack = &nest->sweep;
    while (stack->num && (is_all || nest->now < until)) {
        Open last = stack->opens[stack->num - 1];
        int64_t stop = is_all || last.end < until ? last.end : until;
        if (stop > nest->now) {
            nest->swept[last.row] += stop - nest->now;
            nest->now = stop;
        }
        if (last.end <= nest->now)
            stack->num--;
    }
}

/* Takes the next events; false if there is no memory. Ends must not be before starts, nor differ by 2^63 and more. */
static bool nest_rows(Nest *nest, const uint32_t *threads, const int64_t *starts, const int64_t *ends, size_t num) {
    if (!make_room(nest, num))
        return false;
    for (size_t i = 0; i < num; i++) {
        uint32_t row = (uint32_t)nest->num_rows;
        bool is_other = row == 0 || threads[i] != nest->thread;
        Stack *tree = &nest->tree;
        if (is_other)
            tree->num = 0;
        while (tree->num && tree->opens[tree->num - 1].end <= starts[i])
            tree->num--;
        if (tree->num) {
            Open parent = tree->opens[tree->num - 1];
            nest->parents[row] = parent.row;
            nest->has_parent[row / 8] |= (uint8_t)(1u << row % 8);
            nest->num_parents++;
            nest->covered[parent.row] += (uint64_t)ends[i] - (uint64_t)starts[i];
            nest->has_overhang |= ends[i] > parent.end;
        } else
            nest->parents[row] = 0;
        advance(nest, is_other, starts[i]);
        nest->thread = threads[i];
        nest->now = starts[i];
        if ((ends[i] > starts[i] && !push(nest, tree, row, ends[i])) || !push(nest, &nest->sweep, row, ends[i]))
            return false;
        nest->covered[row] -= (uint64_t)ends[i] - (uint64_t)starts[i]; /* in the end the negative of its own time */
        nest->num_rows++;
    }
    return true;
}

#endif
