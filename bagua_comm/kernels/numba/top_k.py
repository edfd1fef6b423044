"""TopK; see `host.top_k`.

The keys of elements are the bits of their magnitudes, which are in the order of the magnitudes. To choose the
largest, a chunk is first reduced to a few candidates: `keep` groups of elements have a largest key each, and none
that is below the least of these is among the `keep` largest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import Array
from .codegen import address_of, inlined, inner, kernel, scratch
from .numbers import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    NAN,
    SIGN,
    ZERO,
    bits_of,
    bytes_at,
    clear,
    divide,
    doubles_at,
    finite_to_bfloat16,
    float_of,
    floats_at,
    from_bfloat16,
    from_float16,
    halves_at,
    itemsize,
    load,
    longs_at,
    square_root,
    store,
    to_bfloat16,
    to_float16,
    uints_at,
)

_LONGEST = 4096
"""The number of elements of the longest chunk."""

_LANES = 16
"""The number of groups is a multiple of this one."""

_MAGNITUDE, _NAN_KEY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800001)
_NAN_BFLOAT16, _LARGEST_BFLOAT16 = np.uint16(0x7FC0), np.uint16(0x7F7F)
_BOOK_BYTES, _STEP = 16, 1.5

BY_RANKS, BY_SENDERS = 1, 2
"""By what a sum is divided."""


@kernel
def encode_top_k(
    element: int,
    x: int,
    count: int,
    chunk: int,
    keep: int,
    bits: int,
    wire: int,
    values_at: int,
    indices_at: int,
    nbytes: int,
    values: int,
    terms: int,
) -> None:
    """Encode an array; `values` has room for all elements that are sent, in float32, and `terms` in float64."""
    wide = address_of(scratch(_LONGEST))
    keys, order, largest = (
        address_of(scratch(_LONGEST)),
        address_of(scratch(_LONGEST)),
        address_of(scratch(_LONGEST)),
    )
    sent = 0
    for first in range(0, count, chunk):
        length = min(chunk, count - first)
        elements = load(element, x + first * itemsize(element), length, floats_at(wide, _LONGEST))
        kept, at = min(keep, length), wire + indices_at + sent // 2 * 3
        _choose(elements.view(np.uint32), kept, keys, order, largest, floats_at(values + 4 * sent, kept), at)
        sent += kept
    clear(wire, indices_at + (sent + 1) // 2 * 3, nbytes)
    chosen = floats_at(values, sent)
    if bits == 32:
        target = floats_at(wire, sent)
        for k in range(sent):
            target[k] = chosen[k]
    elif bits == 16:
        halves = halves_at(wire, sent)
        for k in range(sent):
            halves[k] = _limited_to_bfloat16(chosen[k])
    else:
        codes = bytes_at(wire + values_at, indices_at - values_at)
        _write_codes(chosen, doubles_at(terms, sent), floats_at(wire, 4), codes)


@kernel
def sum_top_k(
    element: int,
    wires: int,
    n: int,
    divisor: int,
    count: int,
    chunk: int,
    keep: int,
    bits: int,
    values_at: int,
    indices_at: int,
    out: int,
) -> None:
    """Add n encoded arrays, whose addresses are at `wires`, chunk by chunk."""
    addresses, total = longs_at(wires, n), floats_at(address_of(scratch(_LONGEST)), _LONGEST)
    numbers = floats_at(address_of(scratch(_LONGEST)), _LONGEST)
    begin = 0
    for first in range(0, count, chunk):
        length = min(chunk, count - first)
        part, senders, end = total[:length], numbers[:length], begin + min(keep, length)
        part[:], senders[:] = ZERO, ZERO
        for row in range(n):
            wire = addresses[row]
            for k in range(begin, end):
                i = _index(wire + indices_at, k)
                if i < length:
                    value = _value(bits, wire, values_at, k)
                    part[i] += value
                    senders[i] += np.float32(value != 0)
        if divisor == BY_RANKS:
            divide(part, n)
        elif divisor == BY_SENDERS:
            for i in range(length):
                part[i] /= max(senders[i], np.float32(1))
        store(element, part, out + first * itemsize(element))
        begin = end


@kernel
def subtract_top_k(
    element: int, x: int, count: int, chunk: int, keep: int, bits: int, wire: int, values_at: int, indices_at: int
) -> None:
    """Subtract an encoded array; store 0 where the result is not finite."""
    broken, begin = False, 0
    for first in range(0, count, chunk):
        length = min(chunk, count - first)
        end = begin + min(keep, length)
        for k in range(begin, end):
            i = _index(wire + indices_at, k)
            if i < length:
                value = _value(bits, wire, values_at, k)
                broken |= value != value
                lost = _read(element, x, first + i) - value
                _write(element, x, first + i, lost)
                if not abs(_read(element, x, first + i)) < np.float32(np.inf):  # of its own dtype
                    _write(element, x, first + i, ZERO)
        begin = end
    if broken:
        for i in range(count):
            if not abs(_read(element, x, i)) < np.float32(np.inf):
                _write(element, x, i, ZERO)


@inlined
def _key(word: np.uint32) -> np.uint32:
    return min(np.uint32(word & _MAGNITUDE), _NAN_KEY)


@inner
def _choose(
    words: Array, keep: int, keys_at: int, order_at: int, largest_at: int, values: Array, indices: int
) -> None:
    """Choose the `keep` largest of a chunk, given as bits of float32; write them and their packed indices."""
    length = len(words)
    keys, order = uints_at(keys_at, length), uints_at(order_at, length)
    bound = _lower_bound(words, -(-keep // _LANES) * _LANES, uints_at(largest_at, _LONGEST))
    n = 0
    for i in range(length):
        key = _key(words[i])
        keys[n], order[n] = key, i
        n += key >= bound
    threshold = _threshold(keys[:n], keep, bound)
    ties = keep
    for c in range(n):
        ties -= keys[c] > threshold
    sent, even = 0, 0
    target = bytes_at(indices, (keep + 1) // 2 * 3)
    for c in range(n):
        key, i = keys[c], np.int64(order[c])
        if key < threshold or (key == threshold and ties == 0):
            continue
        ties -= key == threshold
        values[sent] = float_of(words[i]) if key < np.uint32(0x7F800000) else float_of(NAN)
        at = sent // 2 * 3
        if sent % 2:
            target[at + 1] = even >> 8 | (i & 15) << 4
            target[at + 2] = i >> 4
        else:
            even = i
            target[at], target[at + 1] = i & 255, i >> 8
            if sent == keep - 1:
                target[at + 2] = 0
        sent += 1


@inner
def _lower_bound(words: Array, groups: int, largest: Array) -> Any:
    """The least of the largest keys of some groups; 0 if there are fewer elements than groups."""
    if groups > len(words):
        return np.uint32(0)
    for j in range(groups):
        largest[j] = np.uint32(0)
    for first in range(0, len(words) // groups * groups, groups):
        for j in range(groups):
            largest[j] = max(largest[j], np.uint32(words[first + j] & _MAGNITUDE))
    least = _NAN_KEY
    for j in range(groups):
        least = min(least, largest[j])
    return least


@inner
def _threshold(keys: Array, keep: int, bound: np.uint32) -> Any:
    """The `keep`-th largest key, which is at least `bound`."""
    low, high = np.uint32(bound), _NAN_KEY
    while low < high:
        middle = np.uint32(low + np.uint32(np.uint32(high - low + np.uint32(1)) >> np.uint32(1)))
        above = np.uint32(0)
        for c in range(len(keys)):
            above += np.uint32(keys[c] >= middle)
        if above >= keep:
            low = middle
        else:
            high = np.uint32(middle - np.uint32(1))
    return low


@inner
def _write_codes(values: Array, terms: Array, book: Array, codes: Array) -> None:
    """Write the code book, and the codes of all values; `terms` is memory for as many numbers."""
    n, finite = len(values), True
    for k in range(n):
        finite &= values[k] == values[k]
    codes[:] = 0
    book[:] = ZERO if finite else float_of(NAN)
    if not finite or n == 0:
        return
    for k in range(n):
        terms[k] = values[k]
    mean = _total(terms) / n
    for k in range(n):
        centered = np.float64(values[k]) - mean
        terms[k] = centered * centered
    step = _STEP * square_root(_total(terms) / max(1, n - 1))
    for k in range(n):
        code = 2
        if step > 0:
            code = np.int64(min(max(np.rint((np.float64(values[k]) - mean) / step + 2.0), 0.0), 3.0))
        codes[k // 4] |= code << 2 * (k % 4)
    for code in range(4):
        count = 0
        for k in range(n):
            mine = codes[k // 4] >> 2 * (k % 4) & 3 == code
            terms[k] = np.float64(values[k]) if mine else 0.0
            count += mine
        if count:
            book[code] = np.float32(_total(terms) / count)


@inner
def _total(terms: Array) -> float:
    """The sum by the tree of `host.top_k`, of which each level overwrites the one below."""
    n = len(terms)
    while n > 1:
        for i in range(n // 2):
            terms[i] = terms[2 * i] + terms[2 * i + 1]
        if n % 2:
            terms[n // 2] = terms[n - 1]
        n = (n + 1) // 2
    return terms[0] + 0.0  # type: ignore[no-any-return]


@inlined
def _index(indices: int, k: int) -> Any:
    """Index k, of 12 bits."""
    three = bytes_at(indices + k // 2 * 3, 3)
    if k % 2:
        return np.int64(three[1]) >> 4 | np.int64(three[2]) << 4
    return np.int64(three[0]) | (np.int64(three[1]) & 15) << 8


@inlined
def _value(bits: int, wire: int, values_at: int, k: int) -> Any:
    """Value k."""
    if bits == 2:
        code = bytes_at(wire + values_at + k // 4, 1)[0] >> np.uint8(2 * (k % 4)) & np.uint8(3)
        return floats_at(wire, 4)[code]
    if bits == 16:
        return from_bfloat16(halves_at(wire + 2 * k, 1)[0])
    return floats_at(wire + 4 * k, 1)[0]


@inner
def _limited_to_bfloat16(x: np.float32) -> Any:
    """Round half to even; numbers stay finite."""
    if x != x:
        return _NAN_BFLOAT16
    half = finite_to_bfloat16(float_of(np.uint32(bits_of(x) & _MAGNITUDE)))
    return np.uint16(min(half, _LARGEST_BFLOAT16) | np.uint16(np.uint32(bits_of(x) & SIGN) >> np.uint32(16)))


@inlined
def _read(element: int, x: int, i: int) -> Any:
    """Element i in float32."""
    if element == FLOAT32:
        return floats_at(x + 4 * i, 1)[0]
    half = halves_at(x + 2 * i, 1)[0]
    return from_float16(half) if element == FLOAT16 else from_bfloat16(half)


@inlined
def _write(element: int, x: int, i: int, value: np.float32) -> None:
    """Round to element i."""
    if element == FLOAT32:
        floats_at(x + 4 * i, 1)[0] = value
    elif element == BFLOAT16:
        halves_at(x + 2 * i, 1)[0] = to_bfloat16(value)
    else:
        halves_at(x + 2 * i, 1)[0] = to_float16(value)
