"""Short chat: greetings, who are you, capitals, opposites, colours, simple definitions and facts.

These facts are taught, not generalised, so only the phrasing varies and nothing here is scored as
held out.
"""
# ruff: noqa: E501, SIM905 (tables and word lists read better on long lines)

from random import Random

from twining.demo.tasks import words as w
from twining.demo.tasks.base import Example, Split, article, assistant, system, user

CAPITALS = dict(
    pair.split(":") for pair in (
        "Argentina:Buenos Aires,Australia:Canberra,Austria:Vienna,Belgium:Brussels,Brazil:Brasilia,Bulgaria:Sofia,"
        "Canada:Ottawa,Chile:Santiago,China:Beijing,Colombia:Bogota,Croatia:Zagreb,Cuba:Havana,Cyprus:Nicosia,"
        "Denmark:Copenhagen,Ecuador:Quito,Egypt:Cairo,England:London,Estonia:Tallinn,Ethiopia:Addis Ababa,"
        "Finland:Helsinki,France:Paris,Germany:Berlin,Ghana:Accra,Greece:Athens,Hungary:Budapest,Iceland:Reykjavik,"
        "India:New Delhi,Indonesia:Jakarta,Iran:Tehran,Iraq:Baghdad,Ireland:Dublin,Italy:Rome,Jamaica:Kingston,"
        "Japan:Tokyo,Kenya:Nairobi,Latvia:Riga,Lebanon:Beirut,Lithuania:Vilnius,Mexico:Mexico City,Mongolia:Ulaanbaatar,"
        "Morocco:Rabat,Nepal:Kathmandu,Nigeria:Abuja,Norway:Oslo,Pakistan:Islamabad,Peru:Lima,Poland:Warsaw,"
        "Portugal:Lisbon,Romania:Bucharest,Russia:Moscow,Senegal:Dakar,Serbia:Belgrade,Slovakia:Bratislava,"
        "Slovenia:Ljubljana,South Korea:Seoul,Spain:Madrid,Sweden:Stockholm,Switzerland:Bern,Thailand:Bangkok,"
        "Tunisia:Tunis,Turkey:Ankara,Ukraine:Kyiv,Uruguay:Montevideo,Venezuela:Caracas,Vietnam:Hanoi,Wales:Cardiff"
    ).split(",")
)  # fmt: skip
OPPOSITES = tuple(
    tuple(pair.split(":")) for pair in (
        "hot:cold big:small up:down day:night black:white fast:slow high:low open:closed old:new happy:sad hard:soft"
        " light:dark long:short rich:poor strong:weak thick:thin wet:dry young:old early:late easy:difficult empty:full"
        " first:last good:bad heavy:light inside:outside left:right loud:quiet love:hate more:less near:far over:under"
        " push:pull right:wrong rough:smooth safe:dangerous sharp:dull sour:sweet start:end tall:short true:false"
        " warm:cool wide:narrow win:lose"
    ).split()
)  # fmt: skip
COLOURS_OF = dict(
    pair.split(":") for pair in (
        "the sky:blue,grass:green,snow:white,coal:black,a banana:yellow,a tomato:red,an orange:orange,blood:red,"
        "the sea:blue,a lemon:yellow,chocolate:brown,milk:white,a leaf:green,gold:yellow,an elephant:grey,"
        "the sun:yellow,a ripe cherry:red,a carrot:orange,a crow:black,a frog:green"
    ).split(",")
)  # fmt: skip
DEFINITIONS = {
    "cache": "A cache keeps results close at hand so that they need not be computed or fetched again.",
    "compiler": "A compiler translates a program from a programming language into machine code.",
    "database": "A database is an organised collection of data that programs can search and change.",
    "token": "A token is a piece of text, such as a word or part of a word, that a language model reads.",
    "language model": "A language model predicts the next token of a text from the tokens before it.",
    "variable": "A variable is a name that stands for a value in a program.",
    "function": "A function is a named piece of code that takes inputs and returns a result.",
    "loop": "A loop repeats a block of code until a condition is met.",
    "list": "A list is an ordered collection of values.",
    "server": "A server is a program or machine that answers requests from other programs.",
    "trellis": "A trellis is a frame of crossed bars on which plants climb.",
    "draft": "A draft is a first version that is checked and corrected later.",
    "volcano": "A volcano is a mountain with an opening through which lava, ash and gas escape.",
    "river": "A river is a large stream of fresh water that flows to a lake or the sea.",
    "island": "An island is land with water on all sides.",
    "desert": "A desert is a dry region where very little rain falls.",
    "planet": "A planet is a large round body that moves around a star.",
    "moon": "A moon is a body that moves around a planet.",
    "star": "A star is a huge ball of hot gas that gives off light.",
    "gravity": "Gravity is the force that pulls things towards each other and keeps us on the ground.",
    "triangle": "A triangle is a shape with three straight sides and three corners.",
    "square": "A square is a shape with four equal sides and four right angles.",
    "circle": "A circle is a round line whose points are all equally far from its centre.",
    "noun": "A noun is a word that names a person, a place or a thing.",
    "verb": "A verb is a word for an action or a state.",
    "library": "A library is a place where people read and borrow books.",
    "bakery": "A bakery is a shop that makes and sells bread and cakes.",
    "bridge": "A bridge carries a road or a path over a river or a valley.",
    "clock": "A clock is a device that shows the time.",
    "compass": "A compass is a tool whose needle points north.",
    "thermometer": "A thermometer is a tool that measures temperature.",
    "winter": "Winter is the coldest season of the year.",
    "bee": "A bee is a flying insect that collects nectar and makes honey.",
    "whale": "A whale is a very large animal that lives in the sea and breathes air.",
    "vine": "A vine is a plant with a long thin stem that climbs or creeps.",
}
SOUNDS = dict(
    pair.split(":") for pair in
    "dog:barks cat:meows cow:moos duck:quacks sheep:bleats horse:neighs lion:roars frog:croaks owl:hoots pig:grunts".split()
)  # fmt: skip
FACTS = (
    ("How many days are in a week?", "A week has seven days."),
    ("How many months are in a year?", "A year has twelve months."),
    ("How many hours are in a day?", "A day has 24 hours."),
    ("How many minutes are in an hour?", "An hour has 60 minutes."),
    ("How many seconds are in a minute?", "A minute has 60 seconds."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many legs does an insect have?", "An insect has six legs."),
    ("How many wheels does a bicycle have?", "A bicycle has two wheels."),
    ("How many sides does a square have?", "A square has four sides."),
    ("How many letters are in the alphabet?", "The English alphabet has 26 letters."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows give us?", "Cows give us milk."),
    ("What is frozen water called?", "Frozen water is called ice."),
    ("Where does the sun rise?", "The sun rises in the east."),
    ("Where does the sun set?", "The sun sets in the west."),
    ("What is the largest planet?", "Jupiter is the largest planet of the solar system."),
    ("What is the closest star to Earth?", "The sun is the closest star to Earth."),
    ("Which month comes after June?", "July comes after June."),
    ("What do plants need to grow?", "Plants need light, water, air and soil."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    (
        "What is the capital of a country?",
        "A capital is the city where the government of a country sits.",
    ),
)
WHO = (
    ("Who are you?", "I am the Twining demo model, a small language model."),
    (
        "What are you?",
        "I am the Twining demo model, a small language model made to show the engine at work.",
    ),
    ("What is your name?", "My name is Twining demo."),
    ("Are you a human?", "No, I am the Twining demo model, a small language model."),
    (
        "What can you do?",
        "I can add small numbers, fill in JSON, call tools, write short Python functions, find facts in a text and tell simple stories.",
    ),
    ("How big are you?", "I am small: about 30 million parameters."),
    ("Can you help me?", "Yes. Ask me for a short function, a sum, a JSON object or a story."),
    ("Are you smart?", "I am a small demo model. I know a few simple things."),
    ("Who made you?", "I was trained from scratch as part of the Twining project."),
    (
        "What is Twining?",
        "Twining is an inference engine and server for language models. I am its demo model.",
    ),
)
HELLO = (
    ("Hello", "Hello! How can I help you?"), ("Hi", "Hi! How can I help you?"), ("Hey", "Hey! What can I do for you?"),
    ("Hello!", "Hello! How can I help you?"), ("Hi there", "Hi there! How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"), ("Good evening", "Good evening! How can I help you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"), ("Thanks", "You are welcome!"),
    ("Thank you!", "You are welcome!"), ("Thank you very much.", "You are welcome!"), ("Bye", "Goodbye!"),
    ("Goodbye", "Goodbye! Have a nice day."), ("See you later", "See you later!"), ("Good night", "Good night!"),
    ("Nice to meet you", "Nice to meet you too!"), ("Please say hello.", "Hello!"), ("Test", "I am here and ready."),
    ("Are you there?", "Yes, I am here."), ("Tell me a joke.", "Why did the bean climb the trellis? It wanted to be twining."),
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful and friendly assistant.", "Be brief.", "Answer in short sentences.",
    "You are a small demo model.", "Answer the question of the user.", "You are an assistant. Be polite and exact.",
)  # fmt: skip


Exchange = tuple[str, str, str]  # question, answer, reasoning
# Words with more than one opposite are asked in one direction only.
_ONE_WAY = frozenset("light old right short long tall wrong".split())


def _ask(rng: Random, forms: str, **slots: str) -> str:
    return rng.choice(forms.split("|")).format(**slots)


def _capital(rng: Random) -> Exchange:
    country = rng.choice(tuple(CAPITALS))
    city = CAPITALS[country]
    forms = "What is the capital of {c}?|Name the capital of {c}.|Which city is the capital of {c}?"
    text = _ask(rng, forms + "|Capital of {c}?", c=country)
    return text, f"The capital of {country} is {city}.", f"{country}: {city}."


def _opposite(rng: Random) -> Exchange:
    a, b = rng.choice(OPPOSITES)
    if rng.random() < 0.5 and not _ONE_WAY & {a, b}:
        a, b = b, a
    forms = "What is the opposite of {a}?|Give me the opposite of {a}.|Opposite of {a}?"
    return _ask(rng, forms, a=a), f"The opposite of {a} is {b}.", f"{a} and {b} are opposites."


def _colour(rng: Random) -> Exchange:
    thing = rng.choice(tuple(COLOURS_OF))
    colour = COLOURS_OF[thing]
    text = _ask(rng, "What colour is {t}?|Which colour does {t} have?", t=thing)
    return text, f"{thing[0].upper()}{thing[1:]} is {colour}.", f"{thing}: {colour}."


def _definition(rng: Random) -> Exchange:
    word = rng.choice(tuple(DEFINITIONS))
    shown = word if word in ("gravity", "winter") else article(word)
    forms = "What is {w}?|Define {w}.|Explain what {w} is.|Tell me what {w} is."
    return _ask(rng, forms, w=shown), DEFINITIONS[word], f"define {word}."


def _sound(rng: Random) -> Exchange:
    animal = rng.choice(tuple(SOUNDS))
    text = f"What sound does {article(animal)} make?"
    return text, f"{article(animal).capitalize()} {SOUNDS[animal]}.", f"{animal}: {SOUNDS[animal]}."


def _next_day(rng: Random) -> Exchange:
    i = rng.randrange(6)
    day, after = w.WEEKDAYS[i : i + 2]
    return f"Which day comes after {day}?", f"{after} comes after {day}.", "the week in order."


def _pair(rng: Random) -> Exchange:
    u = rng.random()
    for limit, source in (
        (0.25, _capital), (0.4, _opposite), (0.5, _colour), (0.68, _definition), (0.73, _sound),
        (0.78, _next_day),
    ):  # fmt: skip
        if u < limit:
            return source(rng)
    if u < 0.87:
        return (*rng.choice(FACTS), "a fact I know.")
    if u < 0.94:
        return (*rng.choice(WHO), "who I am.")
    return (*rng.choice(HELLO), "a short and friendly answer.")


def make(rng: Random, split: Split, effort: str) -> Example:
    """One exchange, sometimes with a system message or small changes of the wording."""
    question, answer, reasoning = _pair(rng)
    if rng.random() < 0.15:
        question = question.lower() if rng.random() < 0.5 else question.rstrip("?.!")
    elif rng.random() < 0.1:
        question = rng.choice(("Please tell me: ", "A question: ", "Quick question. ")) + question
    messages = (user(question), assistant(answer, effort, reasoning))
    if rng.random() < 0.15:
        messages = (system(rng.choice(SYSTEMS)), *messages)  # type: ignore[assignment]
    return Example("chat", messages, effort, check={"text": answer})
