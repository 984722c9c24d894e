"""Texts of the quality contexts that the demo's documents do not cover: registers, chapters, chats, code modules."""

from __future__ import annotations

FIRST_NAMES = (
    "Ada", "Bruno", "Clara", "Dario", "Edith", "Florin", "Greta", "Henrik", "Ilse", "Jarek", "Kira", "Lucan",
    "Mirela", "Nils", "Odile", "Pavel", "Quentin", "Rosa", "Stellan", "Tilda", "Ulla", "Viggo", "Wanda", "Yorick",
)  # fmt: skip
LAST_NAMES = (
    "Alder", "Bexley", "Corvin", "Dunmore", "Eskola", "Farrow", "Gantry", "Hoskin", "Ibsley", "Jessup", "Kettle",
    "Larkin", "Mosley", "Norrell", "Oakes", "Prewitt", "Quarles", "Ransome", "Selwyn", "Tarrant", "Upton", "Vickers",
)  # fmt: skip
OFFICES = (
    "harbour", "customs", "survey", "archive", "tram", "water", "forestry", "market", "post", "railway", "museum",
    "observatory",
)  # fmt: skip
PLACES = (
    "Velmora",
    "Castrin",
    "Ostwick",
    "Perrane",
    "Sundvik",
    "Drennan",
    "Marnholt",
    "Tervane",
    "Quillby",
    "Asker",
)
# for documents of a context's library, which must not contradict those of its prompt
OTHER_LAST_NAMES = (
    "Abbing", "Brandis", "Colefax", "Drury", "Engel", "Fenwick", "Garland", "Hollis", "Ingram", "Jardine", "Kimber",
    "Lockyer", "Marlow", "Nesbit", "Orchard", "Penrose", "Radley", "Stroud", "Thirsk", "Umber", "Vance", "Weldon",
)  # fmt: skip
OTHER_OFFICES = (
    "mint", "canal", "fire", "census", "quarry", "lamp", "ferry", "hospital", "theatre", "bridge", "garden", "prison",
)  # fmt: skip
OTHER_PLACES = (
    "Bellmoor",
    "Corvane",
    "Dunwick",
    "Elstow",
    "Fjelby",
    "Garsten",
    "Hallow",
    "Ivernau",
    "Kestrin",
    "Lomond",
)

# chapters: what the two main characters do; {a} and {b} are theirs, {place} is the book's
PLOT = (
    "{a} waited at the bridge of {place} until the lamps were lit, but nobody came.",
    '"You should have told me about the letter," said {b}, and put it back into the drawer.',
    "On the road to {place} the cart lost a wheel, and {a} walked the rest of the way.",
    "{b} counted the coins twice and found that one was missing.",
    "In the morning {a} asked the miller whether he had seen a stranger with a grey coat.",
    '"It was not the miller," {b} answered, "he was with me all evening."',
    "The bell of {place} rang, although it was long before noon.",
    "{a} opened the box with the small key and found nothing in it but a map.",
    "On the map somebody had marked the old quarry with a cross of red ink.",
    "{b} laughed, because the map was upside down.",
    "They agreed to go to the quarry together and to tell nobody in {place}.",
    "It rained for two days, and {a} mended the lantern by the stove.",
    "When the rain stopped, {b} stood at the door with a rope and a spade.",
    "At the quarry they heard the voice of a man who sang without words.",
    '"I know this song," whispered {a}, "my grandmother sang it when the boats were late."',
    "{b} held the lantern up, and the song broke off.",
    "Behind the stones lay the grey coat, neatly folded, and in its pocket the missing coin.",
    "{a} took the coin, and {b} took the coat, and neither of them said a word.",
    "On the way home they met the postman of {place}, who greeted only one of them.",
    "That night {b} dreamed of a house with eleven doors, all of them locked.",
    "The next letter came without a stamp, and {a} knew the hand at once.",
    "It said: come alone, bring the map, and do not trust your friend.",
    "{a} burned the letter and told {b} that it had been a bill.",
    "But {b} had read it already, before the postman sealed it again.",
)

# chats: what the user mentions, what is asked of it later; {value} is the answer
MEMORIES = (
    ("My booking number for the hotel in {place} is {value}.", "What is my booking number for the hotel in {place}?",
     "Your booking number for the hotel in {place} is", "number"),
    ("The train to {place} leaves from platform {value}.", "From which platform does the train to {place} leave?",
     "The train to {place} leaves from platform", "small"),
    ("My guide in {place} is called {value}.", "What is my guide in {place} called?",
     "Your guide in {place} is called", "person"),
    ("In {place} I want to visit the {value} museum.", "Which museum do I want to visit in {place}?",
     "In {place} you want to visit the", "office"),
    ("I must pick up the parcel in {place} before the {value}th of May.", "Before which day of May must I pick up "
     "the parcel in {place}?", "You must pick up the parcel in {place} before the", "day"),
)  # fmt: skip
SMALL_TALK = (
    (
        "Is it worth taking an umbrella?",
        "The forecast is mixed, so a small umbrella in the bag is a good idea.",
    ),
    (
        "How do I get from the station to the old town?",
        "Follow the tram tracks downhill and cross the second bridge.",
    ),
    (
        "Do I have to book the restaurant?",
        "On weekdays there is nearly always a table, at the weekend it fills up.",
    ),
    (
        "What should I bring home as a present?",
        "Most visitors take the dark honey or a pair of knitted gloves.",
    ),
    ("Can I pay by card everywhere?", "In shops yes, but the market stalls and the ferry take coins only."),
    (
        "Which side of the valley has the better view?",
        "The eastern side in the evening and the western one at dawn.",
    ),
    ("Are the shops open on Sunday?", "Only the bakery is, and it closes when the last loaf has been sold."),
    ("Is the water in the fountain safe?", "Yes, it comes from the same spring as the tap water."),
    ("How long is the walk around the lake?", "About two hours, a little more if the lower path is flooded."),
    (
        "What do people eat for breakfast there?",
        "Rye bread with butter and pickled plums, and very strong tea.",
    ),
)

# code: a module is made of constants and of functions with a default; {name}, {NAME} and values are filled
CONSTANTS = ("RETRY_LIMIT", "TIMEOUT_S", "MAX_ITEMS", "PAGE_SIZE", "CACHE_DAYS", "QUEUE_DEPTH")
FUNCTIONS = (
    'def load_{name}(path):\n    """Read the {name} records, one per line."""\n    with open(path) as file:\n'
    "        return [line.split({sep!r}) for line in file]\n",
    'def count_{name}(records, key={number}):\n    """Count the {name} records of one key."""\n    total = 0\n'
    "    for record in records:\n        if record[0] == key:\n            total += 1\n    return total\n",
    'def merge_{name}(left, right):\n    """Join two lists of {name} records; the right one wins."""\n'
    "    merged = dict(left)\n    merged.update(right)\n    return sorted(merged.items())\n",
    "class {title}Error(ValueError):\n    code = {number}\n\n    def __str__(self):\n"
    '        return f"{name} failed with {{self.code}}"\n',
    'def check_{name}(value):\n    """Refuse {name} values that are out of range."""\n'
    "    if not 0 <= value <= {number}:\n        raise {title}Error(value)\n    return value\n",
)
