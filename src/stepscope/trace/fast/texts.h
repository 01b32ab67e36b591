/* Different texts and their codes, in order of appearance. The empty text is always there, as code 0. */
#ifndef STEPSCOPE_TEXTS_H
#define STEPSCOPE_TEXTS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NO_CODE UINT32_MAX /* no memory, or the texts were made to collide: Python has better tables for those */
enum { MOST_PROBES = 128, FIRST_SLOTS = 256 };

typedef struct {
    size_t begin, length;
    uint64_t hash;
} Text;

typedef struct {
    uint8_t *bytes; /* of all texts, one after the other */
    size_t num_bytes, room_bytes;
    Text *texts;
    uint32_t num, room;
    uint32_t *slots; /* code + 1; 0 is free */
    size_t num_slots; /* a power of two, at least twice the texts */
} Texts;

static inline uint64_t hash_of(const uint8_t *text, size_t length) {
    const uint64_t factor = UINT64_C(0x9E3779B97F4A7C15);
    uint64_t hash = length * factor, word;
    for (; length >= 8; text += 8, length -= 8) {
        memcpy(&word, text, 8);
        hash = (hash ^ word) * factor;
        hash ^= hash >> 29;
    }
    word = 0;
    if (length)
        memcpy(&word, text, length);
    hash = (hash ^ word) * factor;
    return hash ^ hash >> 32;
}

/* The text's slot, or the free one where it belongs; num_slots if there is neither nearby. */
static inline size_t slot_of(const Texts *all, const uint8_t *text, size_t length, uint64_t hash) {
    size_t slot = hash & (all->num_slots - 1);
    for (int i = 0; i < MOST_PROBES; i++, slot = (slot + 1) & (all->num_slots - 1)) {
        if (!all->slots[slot])
            return slot;
        const Text *known = &all->texts[all->slots[slot] - 1];
        if (known->hash == hash && known->length == length &&
            (!length || !memcmp(all->bytes + known->begin, text, length)))
            return slot;
    }
    return all->num_slots;
}

/* Puts every text into the slots anew; false if one finds no place. */
static bool fill_slots(Texts *all) {
    memset(all->slots, 0, all->num_slots * sizeof *all->slots);
    for (uint32_t code = 0; code < all->num; code++) {
        size_t slot = all->texts[code].hash & (all->num_slots - 1);
        for (int i = 0; all->slots[slot]; i++, slot = (slot + 1) & (all->num_slots - 1))
            if (i >= MOST_PROBES)
                return false;
        all->slots[slot] = code + 1;
    }
    return true;
}

static bool grow(void **array, size_t room, size_t size) {
    void *larger = room > SIZE_MAX / size ? NULL : realloc(*array, room * size);
    if (larger)
        *array = larger;
    return larger;
}

static bool has_slots(Texts *all) {
    if (2 * ((size_t)all->num + 1) <= all->num_slots)
        return true;
    size_t num_slots = all->num_slots ? 2 * all->num_slots : FIRST_SLOTS;
    if (num_slots > UINT32_MAX || !grow((void **)&all->slots, num_slots, sizeof *all->slots))
        return false;
    all->num_slots = num_slots;
    return fill_slots(all);
}

static inline bool is_known(const Texts *all, const uint8_t *text, size_t length) {
    size_t slot = slot_of(all, text, length, hash_of(text, length));
    return slot < all->num_slots && all->slots[slot];
}

static inline uint32_t code_of(Texts *all, const uint8_t *text, size_t length) {
    uint64_t hash = hash_of(text, length);
    if (!has_slots(all))
        return NO_CODE;
    size_t slot = slot_of(all, text, length, hash);
    if (slot == all->num_slots)
        return NO_CODE;
    if (all->slots[slot])
        return all->slots[slot] - 1;
    if (all->num == all->room) {
        if (!grow((void **)&all->texts, all->room ? 2 * (size_t)all->room : 64, sizeof *all->texts))
            return NO_CODE;
        all->room = all->room ? 2 * all->room : 64;
    }
    if (length > all->room_bytes - all->num_bytes) {
        size_t room = 2 * all->room_bytes + length + 1024;
        if (!grow((void **)&all->bytes, room, 1))
            return NO_CODE;
        all->room_bytes = room;
    }
    if (length)
        memcpy(all->bytes + all->num_bytes, text, length);
    all->texts[all->num] = (Text){all->num_bytes, length, hash};
    all->num_bytes += length;
    all->slots[slot] = ++all->num;
    return all->num - 1;
}

static void forget_after(Texts *all, uint32_t num) {
    if (num < all->num) {
        all->num_bytes = all->texts[num].begin;
        all->num = num;
        fill_slots(all); /* those that are left had places */
    }
}

static void free_texts(Texts *all) {
    free(all->bytes);
    free(all->texts);
    free(all->slots);
}

#endif
