"""The pool of declared functions for the tool-call task.

Per function: name, description, parameters, ways to ask and a result with a sentence that reports
it. An ask names its parameters in braces; a parameter that an ask leaves out is optional there.
Values are drawn by kind.
"""
# ruff: noqa: E501 (tables and word lists read better on long lines)

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from twining.demo.tasks import words as w
from twining.demo.tasks.json_records import clock, date, full_name, two_words


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter: JSON type, description, draw; enum when only those texts are allowed."""

    type: str
    description: str
    draw: Callable[[Random], Any]
    enum: tuple[str, ...] = ()


def _one(description: str, values: tuple[str, ...]) -> Param:
    return Param("string", description, lambda r: r.choice(values))


def _enum(description: str, *values: str) -> Param:
    return Param("string", description, lambda r: r.choice(values), values)


def _int(description: str, low: int, high: int) -> Param:
    return Param("integer", description, lambda r: r.randint(low, high))


def _num(description: str, low: int, high: int) -> Param:
    return Param("number", description, lambda r: r.randint(low * 2, high * 2) / 2)


_CITY = _one("Name of the city", w.CITIES)
_PERSON = Param("string", "Full name of the person", full_name)
_DATE = Param("string", "Date as YYYY-MM-DD", date)
_TIME = Param("string", "Time as HH:MM", clock)
_ROOM = _one(
    "Room of the house",
    ("kitchen", "bedroom", "office", "garage", "bathroom", "hall", "attic", "cellar"),
)
_TITLE = Param("string", "Title", two_words)
_UNIT = _enum("Unit of the result", "celsius", "fahrenheit")


@dataclass(frozen=True, slots=True)
class Function:
    """A callable function of the pool."""

    name: str
    description: str
    params: dict[str, Param]
    asks: tuple[str, ...]
    result: Callable[[Random], dict[str, Any]]
    report: str  # over the arguments and the result

    def declare(self) -> dict[str, Any]:
        """The tool declaration in chat form; parameters every ask names are required."""
        properties: dict[str, Any] = {}
        for name, param in self.params.items():
            properties[name] = {"type": param.type, "description": param.description}
            if param.enum:
                properties[name]["enum"] = list(param.enum)
        required = [p for p in self.params if all(f"{{{p}}}" in ask for ask in self.asks)]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def _r(**draws: Callable[[Random], Any]) -> Callable[[Random], dict[str, Any]]:
    return lambda rng: {key: value(rng) for key, value in draws.items()}


def _n(low: int, high: int) -> Callable[[Random], Any]:
    return lambda r: r.randint(low, high)


def _c(*values: str) -> Callable[[Random], Any]:
    return lambda r: r.choice(values)


_OK = _r(status=_c("ok", "done"))

FUNCTIONS: tuple[Function, ...] = (
    Function("get_weather", "Get the current weather in a city", {"city": _CITY, "unit": _UNIT},
        ("What is the weather in {city}?", "How is the weather in {city} right now?", "Weather for {city} in {unit}, please."),
        _r(temperature=_n(-10, 35), condition=_c("sunny", "cloudy", "rainy", "windy")), "It is {temperature} degrees and {condition} in {city}."),
    Function("get_forecast", "Weather forecast for the coming days", {"city": _CITY, "days": _int("Number of days", 1, 10)},
        ("What will the weather be in {city} over the next {days} days?", "Give me the {days} day forecast for {city}."),
        _r(summary=_c("mostly sunny", "mostly rainy", "mixed")), "The next {days} days in {city} will be {summary}."),
    Function("get_time", "Get the local time in a city", {"city": _CITY},
        ("What time is it in {city}?", "Tell me the local time in {city}."), _r(time=clock), "It is {time} in {city}."),
    Function("send_email", "Send an email", {"to": _PERSON, "subject": _TITLE},
        ("Send {to} an email with the subject {subject}.", "Write a mail to {to}, subject {subject}."), _OK, "The email to {to} was sent."),
    Function("send_message", "Send a text message to a contact", {"name": _one("First name of the contact", w.FIRST_NAMES), "text": Param("string", "Text of the message", lambda r: f"bring the {r.choice(w.NOUNS)}")},
        ("Text {name}: {text}", "Send a message to {name} saying {text}"), _OK, "Your message to {name} was sent."),
    Function("call_contact", "Start a phone call", {"name": _PERSON}, ("Call {name}.", "Please phone {name}."), _OK, "Calling {name}."),
    Function("set_timer", "Start a timer", {"minutes": _int("Length in minutes", 1, 90)},
        ("Set a timer for {minutes} minutes.", "Start a {minutes} minute timer."), _OK, "The timer is set to {minutes} minutes."),
    Function("set_alarm", "Set an alarm clock", {"time": _TIME, "day": _one("Day of the week", w.WEEKDAYS)},
        ("Wake me at {time}.", "Set an alarm for {time} on {day}.", "I need an alarm at {time}."), _OK, "The alarm is set for {time}."),
    Function("add_event", "Add an event to the calendar", {"title": _TITLE, "date": _DATE, "time": _TIME},
        ("Add {title} to my calendar on {date} at {time}.", "Put {title} on {date} at {time} in the calendar."), _OK, "{title} was added on {date}."),
    Function("list_events", "List the calendar events of a day", {"date": _DATE},
        ("What is on my calendar on {date}?", "Show my events for {date}."), _r(count=_n(0, 9)), "You have {count} events on {date}."),
    Function("turn_on_light", "Switch the light of a room on", {"room": _ROOM, "brightness": _int("Brightness in percent", 1, 100)},
        ("Turn on the light in the {room}.", "Light in the {room} to {brightness} percent."), _OK, "The light in the {room} is on."),
    Function("turn_off_light", "Switch the light of a room off", {"room": _ROOM},
        ("Turn off the light in the {room}.", "Lights out in the {room}."), _OK, "The light in the {room} is off."),
    Function("set_temperature", "Set the heating of a room", {"room": _ROOM, "degrees": _num("Target in degrees Celsius", 15, 28)},
        ("Set the {room} to {degrees} degrees.", "Make it {degrees} degrees in the {room}."), _OK, "The {room} is set to {degrees} degrees."),
    Function("play_music", "Play music", {"song": _TITLE, "volume": _int("Volume from 1 to 10", 1, 10)},
        ("Play {song}.", "Play {song} at volume {volume}.", "I want to hear {song}."), _OK, "Now playing {song}."),
    Function("search_web", "Search the web", {"query": Param("string", "What to search for", lambda r: f"{r.choice(w.COLOURS)} {r.choice(w.NOUNS)}"), "limit": _int("Number of results", 1, 20)},
        ("Search the web for {query}.", "Find {limit} web pages about {query}."), _r(results=_n(1, 900)), "I found {results} results for {query}."),
    Function("convert_currency", "Convert an amount of money", {"amount": _num("Amount", 1, 500), "source": _enum("Currency to convert from", "EUR", "USD", "GBP", "JPY"), "target": _enum("Currency to convert to", "CHF", "SEK", "PLN", "INR")},
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?"), _r(value=_n(1, 9000)), "{amount} {source} is {value} {target}."),
    Function("translate", "Translate a text", {"text": Param("string", "Text to translate", lambda r: f"the {r.choice(w.COLOURS)} {r.choice(w.NOUNS)}"), "language": _one("Target language", w.LANGUAGES)},
        ("Translate '{text}' into {language}.", "How do you say '{text}' in {language}?"), _OK, "The translation into {language} is ready."),
    Function("book_table", "Book a table in a restaurant", {"restaurant": _TITLE, "people": _int("Number of guests", 1, 12), "time": _TIME},
        ("Book a table for {people} at {restaurant} at {time}.", "Reserve {restaurant} for {people} people at {time}."), _OK, "A table for {people} at {restaurant} is booked."),
    Function("book_flight", "Book a flight", {"origin": _one("City of departure", w.CITIES), "destination": _one("City of arrival", w.CITIES), "date": _DATE},
        ("Book a flight from {origin} to {destination} on {date}.", "I want to fly from {origin} to {destination} on {date}."), _r(flight=lambda r: f"TW{r.randint(100, 999)}"), "You are booked on flight {flight} to {destination}."),
    Function("find_train", "Find a train connection", {"origin": _one("City of departure", w.CITIES), "destination": _one("City of arrival", w.CITIES)},
        ("When does the next train go from {origin} to {destination}?", "Find a train from {origin} to {destination}."), _r(departs=clock), "The next train to {destination} leaves at {departs}."),
    Function("get_stock_price", "Get the price of a share", {"symbol": Param("string", "Ticker symbol", lambda r: "".join(r.choices("ABCDEFGHKLMNPRSTUXZ", k=r.randint(3, 4))))},
        ("What is the stock price of {symbol}?", "How much is a share of {symbol}?"), _r(price=_n(2, 900)), "One share of {symbol} costs {price} dollars."),
    Function("add_to_cart", "Put a product into the shopping cart", {"product": _one("Name of the product", w.NOUNS), "quantity": _int("Number of pieces", 1, 20)},
        ("Put {quantity} pieces of {product} into my cart.", "Add {product} to the cart, quantity {quantity}."), _OK, "{quantity} pieces of {product} are in your cart."),
    Function("track_order", "Look up the state of an order", {"order_id": _int("Number of the order", 1000, 99999)},
        ("Where is order {order_id}?", "Track my order {order_id}."), _r(state=_c("packed", "shipped", "delivered", "delayed")), "Order {order_id} is {state}."),
    Function("get_user", "Look up a user by id", {"user_id": _int("Id of the user", 1, 9999)},
        ("Who is user {user_id}?", "Look up user {user_id}."), _r(name=full_name), "User {user_id} is {name}."),
    Function("create_note", "Save a note", {"title": _TITLE, "pinned": Param("boolean", "Keep the note on top", lambda r: r.random() < 0.5)},
        ("Create a note called {title}.", "Save a note {title}, pinned: {pinned}."), _OK, "The note {title} was saved."),
    Function("read_file", "Read a text file", {"path": Param("string", "Path of the file", lambda r: f"{r.choice(w.NOUNS)}/{r.choice(w.NOUNS)}.{r.choice(('txt', 'md', 'py', 'csv'))}")},
        ("Read the file {path}.", "Show me what is in {path}.", "Open {path}."), _r(lines=_n(1, 900)), "{path} has {lines} lines."),
    Function("delete_file", "Delete a file", {"path": Param("string", "Path of the file", lambda r: f"{r.choice(w.NOUNS)}/{r.choice(w.NOUNS)}.{r.choice(('txt', 'md', 'log'))}")},
        ("Delete {path}.", "Please remove the file {path}."), _OK, "{path} was deleted."),
    Function("list_files", "List the files of a folder", {"folder": _one("Folder", w.NOUNS), "recursive": Param("boolean", "Include sub-folders", lambda r: r.random() < 0.5)},
        ("List the files in {folder}.", "Show the files of {folder}, recursive: {recursive}."), _r(count=_n(0, 90)), "{folder} holds {count} files."),
    Function("run_tests", "Run the tests of a module", {"module": _one("Name of the module", w.NOUNS)},
        ("Run the tests of {module}.", "Test the module {module}."), _r(passed=_n(1, 90), failed=_n(0, 5)), "{passed} tests passed and {failed} failed in {module}."),
    Function("query_database", "Look up rows of a table", {"table": _enum("Table", "customers", "orders", "products", "invoices"), "limit": _int("Most rows to return", 1, 100)},
        ("Get {limit} rows from {table}.", "Query the table {table}, at most {limit} rows."), _r(rows=_n(1, 100)), "The query on {table} returned {rows} rows."),
    Function("add_numbers", "Add two numbers", {"a": _int("First number", 100, 9999), "b": _int("Second number", 100, 9999)},
        ("Use the tool to add {a} and {b}.", "Add {a} to {b} with your calculator."), _r(sum=_n(200, 19998)), "The sum is {sum}."),
    Function("multiply_numbers", "Multiply two numbers", {"x": _int("First factor", 11, 999), "y": _int("Second factor", 11, 999)},
        ("Use the tool to multiply {x} by {y}.", "Multiply {x} and {y} with your calculator."), _r(product=_n(200, 99999)), "The product is {product}."),
    Function("roll_dice", "Roll dice", {"count": _int("Number of dice", 1, 6), "sides": _int("Sides per die", 4, 20)},
        ("Roll {count} dice with {sides} sides.", "Throw {count} dice of {sides} sides each."), _r(total=_n(1, 60)), "The dice show {total} in total."),
    Function("find_recipe", "Find a recipe that uses an ingredient", {"ingredient": _one("Main ingredient", w.FOODS), "max_minutes": _int("Longest cooking time", 10, 90)},
        ("Find a recipe with {ingredient}.", "What can I cook with {ingredient} in {max_minutes} minutes?"), _r(dish=_c("a soup", "a stew", "a salad", "a pie")), "You can make {dish} with {ingredient}."),
    Function("get_directions", "Directions between two places", {"start": _one("Start", w.CITIES), "end": _one("Destination", w.CITIES), "mode": _enum("Way of travel", "car", "bus", "bike", "foot")},
        ("How do I get from {start} to {end} by {mode}?", "Directions from {start} to {end} by {mode}, please."), _r(km=_n(5, 900)), "It is {km} km from {start} to {end} by {mode}."),
    Function("get_population", "Number of inhabitants of a city", {"city": _CITY},
        ("How many people live in {city}?", "What is the population of {city}?"), _r(population=_n(10000, 9000000)), "{city} has {population} inhabitants."),
    Function("set_volume", "Set the volume of the speaker", {"level": _int("Level from 0 to 100", 0, 100)},
        ("Set the volume to {level}.", "Volume {level}, please."), _OK, "The volume is {level}."),
    Function("create_task", "Create a task in the to-do list", {"title": Param("string", "What to do", lambda r: f"{r.choice(('buy', 'clean', 'paint', 'repair', 'sell'))} the {r.choice(w.NOUNS)}"), "priority": _enum("Priority", "low", "medium", "urgent")},
        ("Add a task: {title}, priority {priority}.", "Create a {priority} task to {title}."), _OK, "The task to {title} was created."),
    Function("assign_task", "Give a task to a person", {"task_id": _int("Number of the task", 1, 999), "person": _PERSON},
        ("Assign task {task_id} to {person}.", "Give task {task_id} to {person}."), _OK, "Task {task_id} now belongs to {person}."),
    Function("check_stock", "Check how many pieces are in the warehouse", {"product": _one("Name of the product", w.NOUNS), "warehouse": _one("City of the warehouse", w.CITIES)},
        ("How many pieces of {product} are in the {warehouse} warehouse?", "Check the stock of {product} in {warehouse}."), _r(pieces=_n(0, 900)), "There are {pieces} pieces of {product} in {warehouse}."),
)  # fmt: skip
