"""The family of small Python functions: what to ask, the body, and test inputs.

Body text uses {f} (function name), {a} and {b} (parameter names) and {k} (a constant). The
reference is the body itself; expected values are computed by running it.
"""
# ruff: noqa: E501 (tables and word lists read better on long lines)

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from twining.demo.tasks.words import NOUNS

Args = Callable[[Random], tuple[Any, ...]]


def _int(low: int, high: int) -> Callable[[Random], Any]:
    return lambda r: r.randint(low, high)


def _ints(low: int = 1, high: int = 6) -> Callable[[Random], Any]:
    return lambda r: [r.randint(-9, 20) for _ in range(r.randint(low, high))]


def _word(r: Random) -> Any:
    return r.choice(NOUNS)


def _text(r: Random) -> Any:
    return " ".join(r.sample(NOUNS, r.randint(2, 5)))


def _words(r: Random) -> Any:
    return r.sample(NOUNS, r.randint(2, 5))


@dataclass(frozen=True, slots=True)
class Spec:
    """One function of the family. params: pairs (or singles) of parameter names to choose from."""

    names: tuple[str, ...]
    params: tuple[tuple[str, ...], ...]
    does: tuple[str, ...]  # "that ..." clauses
    body: tuple[str, ...]
    draws: tuple[Callable[[Random], Any], ...]


_N = (("n",), ("x",), ("number",), ("value",))
_AB = (("a", "b"), ("x", "y"), ("m", "n"), ("first", "second"))
_L = (("numbers",), ("values",), ("items",), ("nums",), ("data",))
_S = (("text",), ("s",), ("string",), ("word",))
_W = (("words",), ("names",), ("strings",), ("items",))
_LK = (("numbers", "k"), ("values", "n"), ("items", "limit"), ("nums", "x"))
_SC = (("text", "char"), ("s", "c"), ("string", "letter"))
_POS = _int(0, 12)
_INT = _int(-20, 40)

SPECS: tuple[Spec, ...] = (
    Spec(("add", "sum_two", "plus"), _AB, ("returns the sum of {a} and {b}", "adds {a} and {b}"), ("return {a} + {b}",), (_INT, _INT)),
    Spec(("subtract", "minus", "difference"), _AB, ("returns {a} minus {b}", "subtracts {b} from {a}"), ("return {a} - {b}",), (_INT, _INT)),
    Spec(("multiply", "times", "product"), _AB, ("returns the product of {a} and {b}", "multiplies {a} by {b}"), ("return {a} * {b}",), (_INT, _INT)),
    Spec(("add_k", "increase", "plus_const"), _N, ("adds {k} to {a}", "returns {a} plus {k}"), ("return {a} + {k}",), (_INT,)),
    Spec(("times_k", "scale", "multiply_const"), _N, ("multiplies {a} by {k}", "returns {a} times {k}"), ("return {a} * {k}",), (_INT,)),
    Spec(("linear", "affine", "transform"), _N, ("returns {k} times {a} plus 1", "computes {k} * {a} + 1"), ("return {k} * {a} + 1",), (_INT,)),
    Spec(("square", "squared", "to_square"), _N, ("returns the square of {a}", "multiplies {a} by itself"), ("return {a} * {a}",), (_INT,)),
    Spec(("cube", "cubed", "third_power"), _N, ("returns the cube of {a}",), ("return {a} * {a} * {a}",), (_INT,)),
    Spec(("double", "twice", "times_two"), _N, ("returns {a} doubled", "doubles {a}"), ("return 2 * {a}",), (_INT,)),
    Spec(("is_even", "even", "check_even"), _N, ("returns True if {a} is even", "checks whether {a} is even"), ("return {a} % 2 == 0",), (_INT,)),
    Spec(("is_odd", "odd", "check_odd"), _N, ("returns True if {a} is odd", "checks whether {a} is odd"), ("return {a} % 2 == 1",), (_INT,)),
    Spec(("is_multiple", "divides", "is_divisible"), _N, ("returns True if {a} is divisible by {k}", "checks whether {a} is a multiple of {k}"), ("return {a} % {k} == 0",), (_INT,)),
    Spec(("is_positive", "positive", "above_zero"), _N, ("returns True if {a} is greater than zero",), ("return {a} > 0",), (_INT,)),
    Spec(("is_above", "exceeds", "larger_than"), _N, ("returns True if {a} is greater than {k}", "checks whether {a} exceeds {k}"), ("return {a} > {k}",), (_INT,)),
    Spec(("maximum", "larger", "max_two"), _AB, ("returns the larger of {a} and {b}",), ("if {a} > {b}:", "    return {a}", "return {b}"), (_INT, _INT)),
    Spec(("minimum", "smaller", "min_two"), _AB, ("returns the smaller of {a} and {b}",), ("if {a} < {b}:", "    return {a}", "return {b}"), (_INT, _INT)),
    Spec(("absolute", "magnitude", "abs_value"), _N, ("returns the absolute value of {a}",), ("if {a} < 0:", "    return -{a}", "return {a}"), (_INT,)),
    Spec(("sign", "sign_of", "signum"), _N, ("returns 1 for a positive {a}, -1 for a negative {a} and 0 for zero",), ("if {a} > 0:", "    return 1", "if {a} < 0:", "    return -1", "return 0"), (_INT,)),
    Spec(("clamp", "limit_to", "cap"), _N, ("limits {a} to the range 0 to {k}",), ("if {a} < 0:", "    return 0", "if {a} > {k}:", "    return {k}", "return {a}"), (_INT,)),
    Spec(("factorial", "fact", "compute_factorial"), _N, ("returns the factorial of {a}",), ("result = 1", "for i in range(2, {a} + 1):", "    result = result * i", "return result"), (_POS,)),
    Spec(("fibonacci", "fib", "nth_fibonacci"), _N, ("returns the Fibonacci number at index {a}, starting 0, 1",), ("p, q = 0, 1", "for i in range({a}):", "    p, q = q, p + q", "return p"), (_POS,)),
    Spec(("sum_to", "triangle", "sum_up_to"), _N, ("returns the sum of the integers from 1 to {a}",), ("total = 0", "for i in range(1, {a} + 1):", "    total = total + i", "return total"), (_POS,)),
    Spec(("count_down", "countdown", "down_from"), _N, ("returns a list counting down from {a} to 1",), ("return list(range({a}, 0, -1))",), (_POS,)),
    Spec(("first_multiples", "multiples", "multiples_list"), _N, ("returns the first {a} multiples of {k} as a list",), ("return [{k} * i for i in range(1, {a} + 1)]",), (_POS,)),
    Spec(("squares", "square_list", "squares_below"), _N, ("returns the squares of 0 up to {a} - 1 as a list",), ("return [i * i for i in range({a})]",), (_POS,)),
    Spec(("digit_sum", "sum_digits", "add_digits"), _N, ("returns the sum of the digits of {a}",), ("return sum(int(d) for d in str({a}))",), (_int(0, 9999),)),
    Spec(("num_digits", "count_digits", "digits_of"), _N, ("returns how many digits {a} has",), ("return len(str({a}))",), (_int(0, 99999),)),
    Spec(("gcd", "greatest_divisor", "common_divisor"), _AB, ("returns the greatest common divisor of {a} and {b}",), ("while {b}:", "    {a}, {b} = {b}, {a} % {b}", "return {a}"), (_int(1, 60), _int(1, 60))),
    Spec(("is_prime", "prime", "check_prime"), _N, ("returns True if {a} is a prime number",), ("if {a} < 2:", "    return False", "for i in range(2, {a}):", "    if {a} % i == 0:", "        return False", "return True"), (_int(0, 60),)),
    Spec(("power", "raise_to", "pow_int"), _AB, ("returns {a} to the power of {b}",), ("result = 1", "for i in range({b}):", "    result = result * {a}", "return result"), (_int(-5, 6), _int(0, 6))),
    Spec(("average_two", "mean_two", "midpoint"), _AB, ("returns the average of {a} and {b}",), ("return ({a} + {b}) / 2",), (_INT, _INT)),
    Spec(("celsius_to_fahrenheit", "to_fahrenheit", "c_to_f"), (("celsius",), ("c",), ("degrees",)), ("converts {a} from Celsius to Fahrenheit",), ("return {a} * 9 / 5 + 32",), (_INT,)),
    Spec(("area", "rectangle_area", "get_area"), (("width", "height"), ("w", "h"), ("a", "b")), ("returns the area of a rectangle with sides {a} and {b}",), ("return {a} * {b}",), (_POS, _POS)),
    Spec(("perimeter", "rectangle_perimeter", "get_perimeter"), (("width", "height"), ("w", "h"), ("a", "b")), ("returns the perimeter of a rectangle with sides {a} and {b}",), ("return 2 * ({a} + {b})",), (_POS, _POS)),
    Spec(("total", "sum_list", "add_all"), _L, ("returns the sum of all {a}", "adds up {a}"), ("return sum({a})",), (_ints(),)),
    Spec(("product_of", "multiply_all", "list_product"), _L, ("returns the product of all {a}",), ("result = 1", "for x in {a}:", "    result = result * x", "return result"), (_ints(),)),
    Spec(("largest", "find_max", "get_max"), _L, ("returns the largest of {a}",), ("return max({a})",), (_ints(),)),
    Spec(("smallest", "find_min", "get_min"), _L, ("returns the smallest of {a}",), ("return min({a})",), (_ints(),)),
    Spec(("mean", "average", "avg"), _L, ("returns the average of {a}",), ("return sum({a}) / len({a})",), (_ints(),)),
    Spec(("count_items", "size", "length"), _L, ("returns how many {a} there are",), ("return len({a})",), (_ints(0),)),
    Spec(("reverse_list", "backwards", "reversed_copy"), _L, ("returns {a} in reverse order",), ("return {a}[::-1]",), (_ints(0),)),
    Spec(("sort_list", "ascending", "sorted_copy"), _L, ("returns {a} sorted from small to large",), ("return sorted({a})",), (_ints(0),)),
    Spec(("sort_down", "descending", "sort_reverse"), _L, ("returns {a} sorted from large to small",), ("return sorted({a}, reverse=True)",), (_ints(0),)),
    Spec(("first_item", "head", "get_first"), _L, ("returns the first of {a}",), ("return {a}[0]",), (_ints(),)),
    Spec(("last_item", "tail_item", "get_last"), _L, ("returns the last of {a}",), ("return {a}[-1]",), (_ints(),)),
    Spec(("evens", "keep_even", "filter_even"), _L, ("returns only the even {a}", "keeps the even {a}"), ("return [x for x in {a} if x % 2 == 0]",), (_ints(0),)),
    Spec(("odds", "keep_odd", "filter_odd"), _L, ("returns only the odd {a}", "keeps the odd {a}"), ("return [x for x in {a} if x % 2 == 1]",), (_ints(0),)),
    Spec(("keep_above", "filter_above", "over"), _L, ("returns only the {a} greater than {k}",), ("return [x for x in {a} if x > {k}]",), (_ints(0),)),
    Spec(("count_above", "num_above", "how_many_over"), _L, ("returns how many {a} are greater than {k}",), ("return len([x for x in {a} if x > {k}])",), (_ints(0),)),
    Spec(("scale_all", "times_each", "multiply_each"), _L, ("multiplies each of {a} by {k} and returns the list",), ("return [{k} * x for x in {a}]",), (_ints(0),)),
    Spec(("add_to_all", "shift_all", "add_each"), _L, ("adds {k} to each of {a} and returns the list",), ("return [x + {k} for x in {a}]",), (_ints(0),)),
    Spec(("square_all", "squares_of", "square_each"), _L, ("returns the squares of {a} as a list",), ("return [x * x for x in {a}]",), (_ints(0),)),
    Spec(("unique", "distinct", "remove_duplicates"), _L, ("returns {a} without duplicates, in order",), ("result = []", "for x in {a}:", "    if x not in result:", "        result.append(x)", "return result"), (_ints(0),)),
    Spec(("count_value", "occurrences", "how_often"), _LK, ("returns how often {b} occurs in {a}",), ("return {a}.count({b})",), (_ints(0), _int(-3, 6))),
    Spec(("contains", "has_value", "includes"), _LK, ("returns True if {b} is in {a}",), ("return {b} in {a}",), (_ints(0), _int(-3, 6))),
    Spec(("take", "first_few", "prefix"), _LK, ("returns the first {b} of {a}",), ("return {a}[:{b}]",), (_ints(0), _int(0, 4))),
    Spec(("running_total", "cumulative", "prefix_sums"), _L, ("returns the running totals of {a} as a list",), ("result = []", "total = 0", "for x in {a}:", "    total = total + x", "    result.append(total)", "return result"), (_ints(0),)),
    Spec(("reverse_text", "reverse_string", "backward"), _S, ("returns {a} reversed",), ("return {a}[::-1]",), (_word,)),
    Spec(("shout", "to_upper", "uppercase"), _S, ("returns {a} in upper case",), ("return {a}.upper()",), (_text,)),
    Spec(("whisper", "to_lower", "lowercase"), _S, ("returns {a} in lower case",), ("return {a}.lower()",), (_text,)),
    Spec(("text_length", "num_chars", "count_chars"), _S, ("returns the number of characters in {a}",), ("return len({a})",), (_text,)),
    Spec(("count_words", "num_words", "word_count"), _S, ("returns the number of words in {a}",), ("return len({a}.split())",), (_text,)),
    Spec(("first_word", "lead_word", "get_first_word"), _S, ("returns the first word of {a}",), ("return {a}.split()[0]",), (_text,)),
    Spec(("last_word", "final_word", "get_last_word"), _S, ("returns the last word of {a}",), ("return {a}.split()[-1]",), (_text,)),
    Spec(("is_palindrome", "palindrome", "reads_same"), _S, ("returns True if {a} is a palindrome",), ("return {a} == {a}[::-1]",), (lambda r: r.choice((_word(r), "level", "noon", "radar")),)),
    Spec(("count_vowels", "num_vowels", "vowels"), _S, ("returns the number of vowels in {a}",), ("return sum(1 for c in {a} if c in 'aeiou')",), (_text,)),
    Spec(("repeat_text", "repeat", "copies"), _S, ("returns {a} repeated {k} times",), ("return {a} * {k}",), (_word,)),
    Spec(("count_letter", "letter_count", "char_count"), _SC, ("returns how often {b} occurs in {a}",), ("return {a}.count({b})",), (_text, lambda r: r.choice("aeiorst"))),
    Spec(("remove_letter", "strip_char", "without"), _SC, ("returns {a} without any {b}",), ("return {a}.replace({b}, '')",), (_text, lambda r: r.choice("aeiorst"))),
    Spec(("starts_with", "begins_with", "has_prefix"), _SC, ("returns True if {a} starts with {b}",), ("return {a}.startswith({b})",), (_word, lambda r: r.choice("abcfgst"))),
    Spec(("greet", "hello", "greeting"), (("name",), ("person",), ("who",)), ("returns 'Hello, ' followed by {a}",), ("return 'Hello, ' + {a}",), (_word,)),
    Spec(("join_words", "join_all", "sentence"), _W, ("joins {a} with spaces",), ("return ' '.join({a})",), (_words,)),
    Spec(("longest_word", "find_longest", "longest"), _W, ("returns the longest of {a}",), ("return max({a}, key=len)",), (_words,)),
    Spec(("word_lengths", "lengths", "get_lengths"), _W, ("returns the lengths of {a} as a list",), ("return [len(w) for w in {a}]",), (_words,)),
    Spec(("upper_all", "shout_all", "uppercase_all"), _W, ("returns {a} in upper case as a list",), ("return [w.upper() for w in {a}]",), (_words,)),
    Spec(("length_map", "length_dict", "map_lengths"), _W, ("returns a dict from each of {a} to its length",), ("return {{w: len(w) for w in {a}}}",), (_words,)),
    Spec(("count_each", "frequencies", "tally"), _W, ("returns a dict that counts each of {a}",), ("counts = {{}}", "for w in {a}:", "    counts[w] = counts.get(w, 0) + 1", "return counts"), (lambda r: r.choices(NOUNS[:4], k=5),)),
    Spec(("add_lists", "pair_sums", "sum_pairs"), (("a", "b"), ("left", "right"), ("xs", "ys")), ("returns the sums of {a} and {b} item by item",), ("return [x + y for x, y in zip({a}, {b})]",), (_ints(3, 3), _ints(3, 3))),
    Spec(("swap", "swapped", "flip"), _AB, ("returns {b} and {a} as a tuple",), ("return {b}, {a}",), (_INT, _INT)),
    Spec(("flatten", "flatten_list", "merge"), (("rows",), ("lists",), ("matrix",)), ("returns the items of all {a} in one list",), ("return [x for row in {a} for x in row]",), (lambda r: [[r.randint(0, 9) for _ in range(2)] for _ in range(3)],)),
)  # fmt: skip
