"""What a generated load looks like: its kinds, and the numbers that each can be given.

A length is drawn anew each time, around the mean that is given; 95 % of them lie between 2/5 and
2 times the mean. The docstrings are the help of ``hicache trace generate``.
"""

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from hicache.config import Section


class Shape(Section):
    """What all kinds have."""

    output_tokens: PositiveInt = 200
    """Length of an answer."""
    decode_rate: PositiveFloat = 50.0
    """Tokens of an answer a second: what follows it comes after it."""


class Chat(Shape):
    """People who chat over several turns, each with all turns before it."""

    turns: PositiveInt = 8
    """Questions of one person."""
    user_tokens: PositiveInt = 100
    """Length of a question."""
    system_tokens: NonNegativeInt = 500
    """Length of the system prompt, the same for all; 0 for none."""
    think_s: NonNegativeFloat = 30.0
    """Seconds between an answer and the next question."""


class SystemPrompts(Shape):
    """Applications with long system prompts, each asked many single questions."""

    prompts: PositiveInt = 20
    """System prompts; the n-th is asked in proportion to n to the power of -skew."""
    skew: NonNegativeFloat = 1.0
    """0: all are asked alike."""
    system_tokens: PositiveInt = 3000
    """Length of a system prompt."""
    user_tokens: PositiveInt = 200
    """Length of a question."""


class Rag(Shape):
    """Questions about documents that are put before them, in the order of their relevance."""

    documents: PositiveInt = 1000
    """Documents in store; the n-th is found in proportion to n to the power of -skew."""
    skew: NonNegativeFloat = 1.0
    """0: all are found alike."""
    document_tokens: PositiveInt = 1500
    """Length of a document."""
    documents_a_question: PositiveInt = 4
    """How many stand before a question."""
    system_tokens: NonNegativeInt = 300
    """Length of the system prompt, the same for all."""
    user_tokens: PositiveInt = 60
    """Length of a question."""


class Agents(Shape):
    """Agents that call tools in a loop, each call with everything before it."""

    tasks: PositiveInt = 3
    """What an agent is told to do, one after the other."""
    calls: PositiveInt = 12
    """Tool calls for each task."""
    system_tokens: PositiveInt = 12000
    """Length of the system prompt with its tools, the same for all."""
    user_tokens: PositiveInt = 150
    """Length of a task."""
    result_tokens: PositiveInt = 1200
    """Length of what a tool returns."""
    tool_s: NonNegativeFloat = 3.0
    """Seconds that a tool takes."""
    think_s: NonNegativeFloat = 60.0
    """Seconds before the next task."""


class Tree(Shape):
    """Trees of thought: each thought is continued several times at once."""

    depth: PositiveInt = 3
    """Thoughts from the question to an answer."""
    branches: PositiveInt = 4
    """Continuations of each thought that is kept."""
    kept: PositiveInt = 2
    """Thoughts of one depth that are continued."""
    system_tokens: NonNegativeInt = 800
    """Length of the instructions, the same for all."""
    user_tokens: PositiveInt = 400
    """Length of a question."""


KINDS: dict[str, type[Shape]] = {
    "chat": Chat,
    "system-prompts": SystemPrompts,
    "rag": Rag,
    "agents": Agents,
    "tree": Tree,
}
