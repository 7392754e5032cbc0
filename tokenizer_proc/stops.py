"""Stop strings, found in text that arrives in pieces.

Rules: what push() and finish() return, and which stop matches, never depends on how the text was
cut into pieces. Text is held back only while it may still become a stop string, so at most the
longest stop less one character.
Source: Aho and Corasick, "Efficient string matching", CACM 18(6), 1975.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class _Node:
    """One prefix of some stop string.

    depth: its length. fall: the node of its longest proper suffix that is a prefix as well.
    match: length of the longest stop that is a suffix of it (it may be all of it); 0 for none.
    """

    depth: int
    match: int = 0
    fall: int = 0
    next: dict[str, int] = field(default_factory=dict)


class StopMatcher:
    """Watches a text for the first of `stops`.

    First is the one completed by the earliest character, whenever it started: generation ends
    there, with no need to see what follows. Of several completed by the same character the longest
    wins, so the text is cut before all of them. Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty: it would end every text at its start")
        self._nodes = _automaton(stops)
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is certain to stay, the stop string that `text` completed or None).

        Text from the match on is dropped; after a match nothing is taken in any more. Amortised
        O(len(text)).
        """
        if self._matched is not None:
            return "", self._matched
        nodes, state = self._nodes, self._state
        seen = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            state = self._step(state, char)
            if match := nodes[state].match:
                self._held, self._matched = "", seen[end - match : end]
                return seen[: end - match], self._matched
        self._state = state
        keep = len(seen) - nodes[state].depth
        self._held = seen[keep:]
        return seen[:keep], None

    def finish(self) -> str:
        """The text held back, now that nothing follows; empty after a match."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, state: int, char: str) -> int:
        nodes = self._nodes
        while state and char not in nodes[state].next:
            state = nodes[state].fall
        return nodes[state].next.get(char, 0)


def _automaton(stops: tuple[str, ...]) -> list[_Node]:
    """Every prefix of every stop as a node, the empty one first. O(total length)."""
    nodes = [_Node(depth=0)]
    for stop in stops:
        at = 0
        for char in stop:
            if char not in nodes[at].next:
                nodes[at].next[char] = len(nodes)
                nodes.append(_Node(depth=nodes[at].depth + 1))
            at = nodes[at].next[char]
        nodes[at].match = len(stop)
    _link(nodes)
    return nodes


def _link(nodes: list[_Node]) -> None:
    """Set `fall`, and `match` where only a suffix is a stop; shorter prefixes before longer."""
    queue = deque(nodes[0].next.values())
    while queue:
        at = queue.popleft()
        for char, child in nodes[at].next.items():
            fall = nodes[at].fall
            while fall and char not in nodes[fall].next:
                fall = nodes[fall].fall
            nodes[child].fall = nodes[fall].next.get(char, 0)
            nodes[child].match = nodes[child].match or nodes[nodes[child].fall].match
            queue.append(child)
