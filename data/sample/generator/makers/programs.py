"""Makers of Python functions, with a session that calls them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from desk import Desk, Dialogue
from writing import asked, fenced


class Task(NamedTuple):
    """A function to write.

    `calls` are run, and the answer shows their results. `cost` answers a follow-up question.
    """

    ask: str
    source: str
    calls: tuple[str, ...]
    note: str
    cost: str


TASKS = (
    Task("counts the vowels in a string",
         "def count_vowels(text):\n    return sum(ch in 'aeiou' for ch in text.lower())\n",
         ("count_vowels('Onomatopoeia')", "count_vowels('rhythm')"),
         "`True` counts as 1 in a sum, so no counter is needed.",
         "It looks at each character once, so the time grows with the length of the text."),
    Task("reverses the words of a sentence but not their letters",
         "def reverse_words(sentence):\n    return ' '.join(reversed(sentence.split()))\n",
         ("reverse_words('the quick answer is no')", "reverse_words('one')"),
         "`split()` without an argument also swallows repeated spaces.",
         "Splitting, reversing and joining each touch every word once: linear."),
    Task("tells whether a text is a palindrome, ignoring case and punctuation",
         "def is_palindrome(text):\n    letters = [ch for ch in text.lower() if ch.isalnum()]\n    return letters == "
         "letters[::-1]\n",
         ("is_palindrome('Was it a car or a cat I saw?')", "is_palindrome('almost')"),
         "The list keeps letters and digits only; comparing it with its mirror image does the rest.",
         "Linear in time, and it keeps two copies of the letters in memory."),
    Task("returns the n-th Fibonacci number",
         "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
         ("fibonacci(10)", "[fibonacci(i) for i in range(8)]"),
         "The pair slides along the sequence, so nothing is computed twice.",
         "It makes n additions. The naive recursive version makes about 1.6 to the power of n calls."),
    Task("finds all primes below a limit",
         "def primes_below(limit):\n    sieve = [True] * limit\n    sieve[:2] = [False] * min(2, limit)\n    for n in "
         "range(2, int(limit ** 0.5) + 1):\n"
         "        if sieve[n]:\n            for multiple in range(n * n, limit, n):\n                sieve[multiple] "
         "= False\n"
         "    return [n for n, prime in enumerate(sieve) if prime]\n",
         ("primes_below(30)", "len(primes_below(1000))"),
         "This is the sieve of Eratosthenes: cross out the multiples of each prime and keep what is left.",
         "Roughly limit times the logarithm of the logarithm of the limit, which is close to linear."),
    Task("merges two sorted lists into one sorted list",
         "def merge(left, right):\n    out, i, j = [], 0, 0\n    while i < len(left) and j < len(right):\n        if "
         "left[i] <= right[j]:\n"
         "            out.append(left[i])\n            i += 1\n        else:\n            out.append(right[j])\n      "
         "      j += 1\n    return out + left[i:] + right[j:]\n",
         ("merge([1, 4, 9], [2, 3, 10, 11])", "merge([], [5])"),
         "At each step the smaller of the two front items moves over. `<=` keeps equal items in their old order.",
         "Each item is moved once, so the time is the sum of both lengths."),
    Task("does a binary search and returns the position or -1",
         "def find(items, wanted):\n    low, high = 0, len(items) - 1\n    while low <= high:\n        middle = (low "
         "+ high) // 2\n        if items[middle] == wanted:\n"
         "            return middle\n        if items[middle] < wanted:\n            low = middle + 1\n        "
         "else:\n            high = middle - 1\n    return -1\n",
         ("find([2, 3, 5, 7, 11, 13], 11)", "find([2, 3, 5, 7, 11, 13], 4)"),
         "The list has to be sorted. Every comparison throws away half of what is left.",
         "About log2(n) comparisons: 20 for a million items."),
    Task("counts how often each word occurs",
         "from collections import Counter\n\n\ndef word_counts(text):\n    return "
         "dict(Counter(text.lower().split()))\n",
         ("word_counts('the cat and the hat and the bat')",),
         "`Counter` is a dictionary that starts every key at zero.",
         "One dictionary update per word, which is constant time on average."),
    Task("flattens a list of lists of any depth",
         "def flatten(value):\n    if not isinstance(value, list):\n        return [value]\n    return [leaf for item "
         "in value for leaf in flatten(item)]\n",
         ("flatten([1, [2, [3, 4], []], 5])", "flatten([])"),
         "The function calls itself on every item, and an item that is not a list is its own flat list.",
         "Each leaf is copied once per level, so deep nesting makes it slower; a generator would avoid that."),
    Task("turns a number into Roman numerals",
         "def roman(n):\n    marks = [(1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'),\n"
         "             (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')]\n    out = ''\n    "
         "for value, mark in marks:\n"
         "        out += mark * (n // value)\n        n %= value\n    return out\n",
         ("roman(2026)", "roman(944)", "roman(39)"),
         "Writing 4, 9, 40 and so on as marks of their own removes every special case.",
         "The table has 13 rows, so the loop runs 13 times whatever the number is."),
    Task("encrypts a text with the Caesar cipher",
         "def caesar(text, shift):\n    out = []\n    for ch in text:\n        if ch.isascii() and ch.isalpha():\n    "
         "        base = ord('A') if ch.isupper() else ord('a')\n"
         "            ch = chr((ord(ch) - base + shift) % 26 + base)\n        out.append(ch)\n    return "
         "''.join(out)\n",
         ("caesar('Meet me at noon', 3)", "caesar(caesar('Meet me at noon', 3), -3)"),
         "The remainder by 26 makes the alphabet wrap round, for negative shifts as well.",
         "One step per character. As a cipher it is a toy: there are only 25 keys to try."),
    Task("checks whether brackets are balanced",
         "def balanced(text):\n    pairs = {')': '(', ']': '[', '}': '{'}\n    stack = []\n    for ch in text:\n      "
         "  if ch in '([{':\n            stack.append(ch)\n"
         "        elif ch in pairs and (not stack or stack.pop() != pairs[ch]):\n            return False\n    return "
         "not stack\n",
         ("balanced('a[i] = (b + c) * {d}')", "balanced('(]')", "balanced('((')"),
         "Opening brackets go on a stack; a closing one must match the one on top.",
         "Linear in the text; the stack is never larger than the deepest nesting."),
    Task("groups a list of words by their first letter",
         "def by_initial(words):\n    groups = {}\n    for word in words:\n        groups.setdefault(word[0], "
         "[]).append(word)\n    return groups\n",
         ("by_initial(['apple', 'bean', 'avocado', 'beet', 'carrot'])",),
         "`setdefault` returns the list that is there or puts an empty one in first.",
         "One dictionary look-up per word."),
    Task("transposes a matrix given as a list of rows",
         "def transpose(rows):\n    return [list(column) for column in zip(*rows)]\n",
         ("transpose([[1, 2, 3], [4, 5, 6]])",),
         "`zip(*rows)` takes the first item of every row, then the second, and so on.",
         "Every cell is copied once."),
    Task("removes duplicates from a list and keeps the order",
         "def unique(items):\n    return list(dict.fromkeys(items))\n",
         ("unique([3, 1, 3, 2, 1])", "unique('mississippi')"),
         "Dictionaries remember the order in which keys arrived, and a key can be there only once.",
         "Linear on average; the items must be hashable."),
    Task("formats a number of seconds as hours, minutes and seconds",
         "def hms(seconds):\n    minutes, seconds = divmod(seconds, 60)\n    hours, minutes = divmod(minutes, 60)\n   "
         " return f'{hours}:{minutes:02d}:{seconds:02d}'\n",
         ("hms(3725)", "hms(59)"),
         "`divmod` gives quotient and remainder in one go.",
         "A fixed number of steps, whatever the input."),
    Task("computes the Hamming distance of two strings",
         "def hamming(a, b):\n    if len(a) != len(b):\n        raise ValueError('the strings differ in length')\n    "
         "return sum(x != y for x, y in zip(a, b))\n",
         ("hamming('karolin', 'kathrin')", "hamming('1011101', '1001001')"),
         "Strings of different lengths have no Hamming distance, so that case is an error and not a guess.",
         "One comparison per position."),
    Task("splits a list into chunks of a given size",
         "def chunks(items, size):\n    return [items[i:i + size] for i in range(0, len(items), size)]\n",
         ("chunks([1, 2, 3, 4, 5, 6, 7], 3)", "chunks('abcdef', 2)"),
         "A slice that runs past the end is simply shorter, so the last chunk needs no special case.",
         "Every item is copied once."),
    Task("run-length encodes a string",
         "from itertools import groupby\n\n\ndef run_lengths(text):\n    return [(ch, len(list(run))) for ch, run in "
         "groupby(text)]\n",
         ("run_lengths('aaabccdd')", "run_lengths('')"),
         "`groupby` starts a new group whenever the character changes.",
         "Linear: each character is looked at once."),
    Task("evaluates an expression in reverse Polish notation",
         "def rpn(expression):\n    stack = []\n    for token in expression.split():\n        if token in '+-*/':\n   "
         "         b, a = stack.pop(), stack.pop()\n"
         "            stack.append({'+': a + b, '-': a - b, '*': a * b, '/': a / b if b else None}[token])\n        "
         "else:\n            stack.append(float(token))\n    return stack.pop()\n",
         ("rpn('3 4 + 2 *')", "rpn('10 2 8 * + 3 -')"),
         "Numbers wait on a stack and an operator takes the two on top. Mind the order: the right operand comes off "
         "first.",
         "One push or pop per token."),
    Task("finds the longest word in a sentence",
         "def longest(sentence):\n    return max(sentence.split(), key=len)\n",
         ("longest('a small boat crossed the wide estuary')",),
         "`max` with `key=len` returns the first of the longest words if several are equally long.",
         "It measures each word once."),
    Task("parses a query string such as `a=1&b=2` into a dictionary",
         "def parse_query(text):\n    return dict(pair.split('=', 1) for pair in text.split('&') if '=' in pair)\n",
         ("parse_query('page=2&sort=name&empty=')", "parse_query('')"),
         "The `1` in `split('=', 1)` keeps further equals signs inside the value. For real URLs use `urllib.parse`, "
         "which also decodes %20 and friends.",
         "Linear in the length of the text."),
)  # fmt: skip


def session(task: Task, calls: Iterable[str]) -> str:
    scope: dict[str, object] = {}
    exec(task.source, scope)  # noqa: S102 - the programs stand in TASKS
    return "\n".join(f">>> {call}\n{eval(call, scope)!r}" for call in calls)  # noqa: S307 - as above


def code(d: Desk) -> Dialogue:
    task = d.deal("task", TASKS)
    ask = d.pick(
        [
            "Write a Python function that {}.",
            "I need a function in Python that {}. How would you do it?",
            "Show me Python code that {}.",
            "How do I write a function that {}?",
            "Is there a short way in Python to write something that {}?",
        ]
    )
    intro = d.pick(["Here it is:", "A short version:", "This does it:", "For example:", "One way:"])
    answer = f"{intro}\n\n{fenced(task.source, 'python')}\n\n{task.note}\n\n" + fenced(
        session(task, task.calls[:1]), "python"
    )
    turns = [(asked(d, ask.format(task.ask)), answer)]
    if len(task.calls) > 1:
        turns.append(
            (
                d.pick(["Another example?", "Can you run it on something else?", "Show one more call, please."]),
                fenced(session(task, task.calls[1:]), "python"),
            )
        )
    if d.chance(0.7):
        turns.append((d.pick(["How fast is it?", "What is the running time?", "Does it scale?"]), task.cost))
    return Dialogue(turns, fenced(task.source, "python"))
