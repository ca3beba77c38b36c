"""Word lists of the tasks: names, places, things. Plain common words, written for this project."""
# ruff: noqa: E501, SIM905 (tables and word lists read better on long lines)

FIRST_NAMES = tuple(
    "Ada Alma Amir Anna Arun Ben Bella Boris Carla Carl Chen Clara Dan Daria David Diego Edith Elena Elias Emma Erik Eva"
    " Fatima Felix Finn Flora Frank Freya Gina Grace Greta Hana Hans Helen Henry Hugo Ida Igor Ines Iris Ivan Jack Jana"
    " Jonas Julia Kai Karin Kate Kenji Lara Lars Lena Leo Lily Lina Lucas Luis Luna Maria Marco Marta Max Maya Mia Milo"
    " Mina Nadia Nina Noah Nora Olga Olaf Omar Oscar Otto Paul Petra Pia Priya Quinn Rafael Rita Rosa Ruth Sam Sara Simon"
    " Sofia Stella Sven Tara Theo Tim Tina Tom Uma Vera Victor Wendy Will Yara Yuki Yusuf Zara Zoe".split()
)
LAST_NAMES = tuple(
    "Adler Baker Berg Brandt Brown Castro Clark Cole Costa Cruz Dahl Diaz Evans Falk Fischer Ford Fox Garcia Gray Green"
    " Hall Hansen Hill Holm Hunt Ito Jensen Kaya Keller Khan King Klein Kovacs Lang Larsen Lee Lind Lopez Mason Meyer"
    " Mills Mora Moreau Nagy Novak Olsen Park Patel Perez Petrov Quist Ramos Reed Reyes Rossi Sato Silva Singh Stone Sun"
    " Tanaka Torres Turner Vega Vogel Wagner Walsh Ward Weber West White Wolf Wood Young Zhang".split()
)
CITIES = tuple(
    "Amsterdam Athens Austin Bergen Berlin Bern Bogota Boston Bristol Brno Cairo Chicago Cork Dallas Delhi Denver Dublin"
    " Geneva Ghent Graz Hamburg Hanoi Helsinki Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Malmo Miami Milan Mumbai"
    " Munich Nairobi Naples Nice Osaka Oslo Ottawa Paris Perth Porto Prague Quito Riga Rome Seattle Seoul Seville Sofia"
    " Sydney Tallinn Tampa Tokyo Toronto Tunis Turin Vienna Vilnius Warsaw York Zagreb Zurich".split()
)
COLOURS = tuple(
    "red blue green yellow orange purple brown black white grey pink golden silver violet".split()
)
ADJECTIVES = tuple(
    "Amber Ancient Arctic Autumn Bitter Bold Bright Bronze Calm Cedar Clear Clever Cloudy Copper Coral Crimson Crystal"
    " Daring Deep Distant Dusty Early Eastern Emerald Fallen Famous Fiery Foggy Frozen Gentle Giant Gilded Golden Grand"
    " Green Hidden Hollow Humble Icy Iron Ivory Jade Jolly Lively Lonely Lost Lucky Marble Merry Misty Modest Mossy Narrow"
    " Noble Northern Olive Opal Pale Proud Quick Quiet Rapid Rocky Royal Ruby Rusty Sandy Scarlet Secret Shady Silent"
    " Silver Snowy Solar Southern Steady Stony Stormy Sunny Swift Tall Timber Velvet Violet Wandering Western Wild Windy"
    " Winter Wise Young".split()
)
EMBLEMS = tuple(
    "Anchor Badger Beacon Bear Beaver Birch Bison Bridge Brook Canyon Castle Cliff Comet Crane Crow Deer Dolphin Dove"
    " Dragon Eagle Elk Falcon Fern Finch Forest Fountain Fox Garden Gull Harbor Hare Hawk Heron Hill Horse Island Ivy"
    " Kestrel Lagoon Lake Lantern Lark Lion Lotus Lynx Maple Marsh Meadow Moon Moose Mountain Oak Orchid Otter Owl Panda"
    " Pebble Pelican Pine Planet Pony Prairie Quail Rabbit Raven Reef Ridge River Robin Rose Salmon Seal Shell Sparrow"
    " Spring Star Stork Sun Swan Thistle Tiger Tower Trout Tulip Valley Walrus Whale Willow Wolf Wren".split()
)
NOUNS = tuple(
    "apple arrow basket bell bench bird boat book bottle box bread brush bucket button camera candle card carpet chair"
    " cheese clock cloud coat coin cookie cup desk dog door dress drum egg engine feather fence finger fire fish flag"
    " flower fork fruit garden gate glass glove grass guitar hammer hat hill honey horse house island jacket jar key kite"
    " kitten knife ladder lamp leaf lemon letter lion map market mirror money moon mouse needle nest night ocean onion"
    " paper pencil piano picture pillow plant plate pocket pond potato puzzle rabbit radio rain ribbon ring river road"
    " rock roof room rope rose sand school scissors shell ship shirt shoe silver snow soap sock song spoon spring star"
    " stone story street string sugar summer sun table tea tiger tomato tower town train tree truck umbrella valley"
    " village violin wagon wall water wheel whistle wind window winter wolf wood".split()
)
ITEMS = (  # plural countable things
    *"apples balls books bottles boxes buttons cards coins cookies cups eggs flowers keys lemons letters marbles".split(),
    *"oranges pears pencils pens photos plants plums shells stamps stickers stones tickets toys tulips".split(),
)
ANIMALS = tuple(
    "bear cat cow crow deer dog duck elephant fox frog goat goose hare hedgehog horse kitten lamb mouse otter owl parrot"
    " pig pony puppy rabbit raven sheep sparrow squirrel swan tortoise turtle".split()
)
FOODS = tuple(
    "bread butter cake carrots cheese cherries chicken chocolate coffee corn eggs fish flour grapes ham honey jam juice"
    " lemons lentils milk mushrooms noodles nuts olives onions pasta peas pepper pizza potatoes rice salad salt soup"
    " spinach sugar tea tofu tomatoes yogurt".split()
)
JOBS = tuple(
    "accountant architect artist baker builder carpenter chef cleaner dentist designer doctor driver editor electrician"
    " engineer farmer gardener journalist judge lawyer librarian mechanic musician nurse painter pharmacist photographer"
    " pilot plumber professor sailor scientist singer tailor teacher translator waiter writer".split()
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = tuple(
    "January February March April May June July August September October November December".split()
)
LANGUAGES = tuple(
    "Arabic Chinese Dutch English French German Greek Hindi Italian Japanese Polish Spanish".split()
)
NUMBER_WORDS = tuple("zero one two three four five six seven eight nine ten eleven twelve".split())
