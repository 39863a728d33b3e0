"""What is said in ``hicache demo``: the chats, the order of their turns, and the settings.

Knows nothing of how it is run or shown. Sizes are such that a chat that paused for one other is
found in L2, and one that paused for longer in L3.
"""

from dataclasses import dataclass

SETTINGS: dict[str, object] = {
    "cache.page_size": 16,
    # 30 pages: the shared system prompt and two chats, one of them while it is answered.
    "cache.device.size": "30p",
    "cache.host.size": "16p",
    "cache.storage.backend": "lmdb",
    "cache.storage.size": "1GB",
    # A demo shows the same on a machine that is busy.
    "cache.storage.prefetch": "wait_complete",
    "cache.storage.deadline_s": 30.0,
    "engine.model": "smollm2",
    "engine.device": "cpu",
    "engine.dtype": "float32",
    "engine.chunk_tokens": 256,
    "engine.fixed_chunks": True,
}

MAX_ANSWER_TOKENS = 14

SYSTEM = """\
You are a helpful assistant. You answer questions about short texts. Every answer is one short \
sentence, and it is taken from the text that the user has sent.

An example of a text: The old bridge of Mostar was built in 1566. It is 29 metres long and 4 \
metres wide, and it was made of white stone. Every summer young men jump from it into the river \
Neretva, 24 metres below.
When was the bridge built? It was built in 1566.
How long is it? It is 29 metres long.
What is it made of? It is made of white stone.

Another example of a text: Maria has a small bakery in Porto. She opens at 6 in the morning, and \
on Sundays at 8. Her best cake has almonds and lemon in it and costs 3 euros.
Where is the bakery? It is in Porto.
When does it open on Sundays? It opens at 8 in the morning.
What does the cake cost? It costs 3 euros.
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One turn: who speaks, and what is asked."""

    chat: str
    text: str


LINES = (
    Line(
        "Ana",
        "The lighthouse of Cape Gull was built in 1872. It is 54 metres high and has "
        "214 steps and no lift. The first keeper was Henry Mole. He lived there with his wife, "
        "four children and a blue parrot. The parrot could say good night in three languages. "
        "Today the lighthouse is a museum. Tickets cost 8 euros. "
        "When was the lighthouse built?",
    ),
    Line(
        "Ben",
        "The night train to Vienna leaves Zurich at 21:40 from platform 7 and arrives "
        "at 7:50 in the morning. It has eleven cars, and the restaurant is in car 4. Soup, bread "
        "and tea are served until midnight. A bed costs 60 euros. Dogs travel for half of the "
        "price, and bicycles stay at home. "
        "When does the train leave Zurich?",
    ),
    Line(
        "Cleo",
        "The hotel Blue Whale is in Bergen, at the end of the fish market. It has 31 rooms, all "
        "of them with a view of the harbour, and a sauna on the roof. Breakfast begins at 6 for "
        "the fishermen and ends at 11 for everybody else. A room costs 90 euros, and the cat, "
        "who is called Admiral, is free. "
        "Where is the hotel?",
    ),
    Line("Ana", "How high is it?"),
    Line(
        "Dan",
        "The music festival of Elm Valley begins on 3 July and lasts four days. It takes place "
        "on a meadow behind the mill. The first concert is by Nina Storm, who plays the harp and "
        "the drums at the same time. Camping costs 15 euros. Everybody must be quiet after two "
        "in the morning, even the drummers. "
        "When does the festival begin?",
    ),
    Line("Cleo", "How many rooms does it have?"),
    Line("Ben", "How much is a bed?"),
    Line("Dan", "Who plays the first concert?"),
    Line("Ana", "Who was the first keeper?"),
)
"""Before the restart."""

LINES_AFTER_RESTART = (
    Line("Ana", "What colour was the parrot?"),
    Line("Ben", "In which car is the restaurant?"),
    Line("Cleo", "What is the name of the cat?"),
    Line("Dan", "Where does it take place?"),
)
"""Every chat once."""
