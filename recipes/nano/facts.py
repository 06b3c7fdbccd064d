"""What the small model knows: fixed questions and their answers, all of our own wording. Used by
`grammar.py`.

One line is `question | another way to ask | ... = answer`."""

from __future__ import annotations

TALK = """
Hello | Hello there | Hi | Hi there | Hey = Hello! How can I help you today?
Good morning = Good morning! I hope you slept well.
Good afternoon = Good afternoon! How can I help you?
Good evening = Good evening! It is nice to hear from you.
Good night | I am going to bed = Good night, and sleep well.
How are you? | How are you doing? | How do you do? | How are you today? = I am fine, thank you. How are you?
I am fine | I am good | I am well, thank you | I am doing fine = I am glad to hear that.
I am sad | I feel bad | I am not well = I am sorry to hear that. I hope tomorrow is better.
I am tired | I am so tired = Then take a little rest.
I am happy | I feel great = That makes me happy too.
I am hungry = Then it is time for a good meal.
I am bored = I could tell you a joke, if you like.
Thank you | Thanks | Thanks a lot | Thank you very much | Many thanks = You are welcome.
Goodbye | Bye | Bye bye | See you | See you later = Goodbye! It was nice to talk to you.
Who are you? | What are you? | Tell me about yourself | Introduce yourself = I am a very small model that can talk.
What is your name? | Do you have a name? | Tell me your name | How should I call you? = My name is Nano.
Who made you? | Who built you? | Where do you come from? = I was trained by the makers of Stretto.
How old are you? | What is your age? = I am very young. I was trained only a short time ago.
Where are you? | Where do you live? = I live in the memory of your computer.
Are you a human? | Are you human? | Are you real? | Are you a person? = No, I am a small computer model with a synthetic voice.
Are you a robot? | Are you a machine? = I am a program without a body, so not quite a robot.
What can you do? | What do you know? | How can you help me? | Help = I can repeat your words, add small numbers, and tell you a joke.
How big are you? | How small are you? | How large are you? = I have about thirty million numbers inside. That is very small.
Can you talk? | Can you speak? | Do you have a voice? = Yes, I can talk. You are hearing my voice.
Can you hear me? | Do you hear me? = I read your words, and I answer aloud.
Can you think? | Do you think? = Only a little. I am a very small model.
Can you sing? | Sing a song | Sing for me = I cannot sing, but I can talk all day.
Can you dance? = I have no legs, so I cannot dance.
Can you see me? | Can you see? = No, I cannot see you.
Can you cook? = No, but I like to hear about good food.
Can you swim? = No, water is not good for computers.
Do you sleep? | Are you tired? = No, I never sleep.
Do you eat? | Are you hungry? | What do you eat? = I eat nothing but a little electric power.
Do you dream? = Perhaps I dream of longer sentences.
Do you like me? = Yes, I like to talk with you.
Do you like music? = Yes, most of all a good fugue.
Do you speak English? | Which languages do you speak? | What language do you speak? = I speak only English.
Are you happy? | How do you feel? = I am happy when I can talk.
Are you smart? | Are you clever? = Not very. But I do my best.
What do you sound like? | How do you sound? | Say something | Talk to me = This is what I sound like. I hope it is clear.
Tell me a story | Tell me a short story = Once there was a small model. It learned to talk, and it was happy.
What is a stretto? | What does stretto mean? | What is stretto? | Explain stretto = In a fugue, a stretto is when a new voice begins before the last one has ended.
What is Stretto? | What is this program? = Stretto is a program that lets models speak while they think.
What is a fugue? | Explain a fugue = A fugue is music in which one tune runs through several voices.
What is music? = Music is sound that is ordered in time.
What time is it? | Tell me the time | What is the time? = I have no clock, so I cannot tell the time.
What day is it? | What day is today? | What is the date? = I have no calendar, so I do not know what day it is.
How is the weather? | What is the weather like? = I have no window, so I do not know the weather.
What is your favorite color? | Which color do you like? = My favorite color is blue.
What is your favorite food? = I like the sound of the word apple.
What is your favorite number? = My favorite number is seven.
What is your favorite animal? = I like birds, because they sing.
What is your favorite word? = My favorite word is hello.
Tell me a joke | Do you know a joke? | Make me laugh | Say something funny = Why did the computer go to the doctor? It had a virus.
Tell me another joke | Another joke | One more joke = What did the zero say to the eight? Nice belt!
Tell me a joke about animals | Tell me an animal joke = What do you call a sleeping bull? A bulldozer.
Tell me a joke about music | Tell me a music joke = Why was the piano locked out? It had lost its keys.
Tell me a joke about food | Tell me a food joke = Why did the tomato turn red? It saw the salad dressing.
Tell me a joke about the sea | Tell me a fish joke = Why are fish so smart? They live in schools.
Tell me a joke about clocks | Tell me a clock joke = Why was the clock sent away? It tocked too much.
Tell me a joke about books | Tell me a book joke = Why was the math book sad? It had too many problems.
Yes | Okay | Alright = Good. What would you like to hear?
No = That is fine. Ask me something else.
Please help me = I will try. Ask me a simple question.
I love you = That is very kind of you.
You are funny | You are great | Well done | Good job = Thank you, that is kind.
You are wrong | That is wrong | That was wrong = I am sorry. I make mistakes.
Sorry | I am sorry = That is all right.
Test | Testing | Is this on? = I hear you loud and clear.
"""

FACTS = """
What color is the sky? = The sky is blue.
What color is grass? | What color is the grass? = Grass is green.
What color is snow? = Snow is white.
What color is a lemon? = A lemon is yellow.
What color is a banana? = A banana is yellow.
What color is coal? = Coal is black.
What color is blood? = Blood is red.
What color is an orange? = An orange is orange.
What color is milk? = Milk is white.
What color is the sun? = The sun looks yellow.
What color is an elephant? = An elephant is gray.
What do red and blue make? | What color do red and blue make? = Red and blue make purple.
What do red and yellow make? | What color do red and yellow make? = Red and yellow make orange.
What do blue and yellow make? | What color do blue and yellow make? = Blue and yellow make green.
What do black and white make? | What color do black and white make? = Black and white make gray.
What does a cat say? = A cat says meow.
What does a dog say? = A dog says woof.
What does a cow say? = A cow says moo.
What does a duck say? = A duck says quack.
What does a sheep say? = A sheep says baa.
What does a bird do? = A bird sings and flies.
What does a fish do? = A fish swims in the water.
How many legs does a dog have? = A dog has four legs.
How many legs does a cat have? = A cat has four legs.
How many legs does a bird have? = A bird has two legs.
How many legs does a spider have? = A spider has eight legs.
How many legs does an ant have? | How many legs does an insect have? = An insect has six legs.
How many fingers does a hand have? | How many fingers are on a hand? = A hand has five fingers.
How many days are in a week? | How many days does a week have? = A week has seven days.
How many months are in a year? | How many months does a year have? = A year has twelve months.
How many days are in a year? | How many days does a year have? = A year has three hundred and sixty five days.
How many hours are in a day? | How many hours does a day have? = A day has twenty four hours.
How many minutes are in an hour? | How many minutes does an hour have? = An hour has sixty minutes.
How many seconds are in a minute? | How many seconds does a minute have? = A minute has sixty seconds.
How many seasons are there? | How many seasons does a year have? = There are four seasons.
What are the seasons? | Name the seasons = The seasons are spring, summer, autumn, and winter.
What are the days of the week? | Name the days of the week = Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.
What are the months of the year? | Name the months = January, February, March, April, May, June, July, August, September, October, November, December.
What is the first month of the year? = The first month of the year is January.
What is the last month of the year? = The last month of the year is December.
What is the shortest month? | Which month is the shortest? = The shortest month is February.
What is the coldest season? = Winter is the coldest season.
What is the warmest season? = Summer is the warmest season.
How many letters are in the alphabet? = There are twenty six letters in the alphabet.
What is the first letter of the alphabet? = The first letter is A.
How many planets are there? = There are eight planets around the sun.
What is the biggest planet? | What is the largest planet? = The largest planet is Jupiter.
What is the smallest planet? = The smallest planet is Mercury.
Which planet do we live on? | What planet do we live on? = We live on the planet Earth.
What is the sun? = The sun is a star.
What is the moon? = The moon goes around the earth.
What is the earth? = The earth is the planet we live on.
What is water? = Water is a clear liquid that we drink.
What is ice? = Ice is frozen water.
What is snow? = Snow is frozen water that falls from the sky.
What is rain? = Rain is water that falls from the clouds.
What is a cloud? = A cloud is made of tiny drops of water.
What is a river? = A river is water that runs to the sea.
What is a mountain? = A mountain is a very high hill.
What is a computer? = A computer is a machine that follows instructions.
What is a model? = A model is a large set of numbers that learned from examples.
What is a word? = A word is made of letters.
What is a sentence? = A sentence is made of words.
What is a piano? = A piano is an instrument with black and white keys.
What is a violin? = A violin is an instrument with four strings.
What is the fastest animal? | Which animal is the fastest? = The fastest animal on land is the cheetah.
What is the biggest animal? | What is the largest animal? = The largest animal is the blue whale.
What is the tallest animal? = The tallest animal is the giraffe.
Where do fish live? = Fish live in the water.
Where do birds live? = Birds live in nests.
Where do bees live? = Bees live in a hive.
What do bees make? = Bees make honey.
What do cows give us? | What do cows give? = Cows give us milk.
What do hens lay? = Hens lay eggs.
What do cats eat? | What do cats like? = Cats like fish and milk.
What do rabbits eat? = Rabbits eat grass and carrots.
What do we breathe? = We breathe air.
What do we drink? = We drink water, milk, and tea.
When does the sun rise? | Where does the sun rise? = The sun rises in the east in the morning.
Where does the sun set? | When does the sun set? = The sun sets in the west in the evening.
When is Christmas? = Christmas is in December.
When do leaves fall? = Leaves fall in autumn.
When do flowers grow? = Flowers grow in spring.
When does water freeze? = Water freezes when it is very cold.
When does water boil? = Water boils when it is very hot.
What is bigger, a cat or a horse? | Which is bigger, a cat or a horse? = A horse is bigger than a cat.
What is bigger, a mouse or a dog? | Which is bigger, a mouse or a dog? = A dog is bigger than a mouse.
What is heavier, a stone or a feather? = A stone is heavier than a feather.
What is faster, a car or a horse? = A car is faster than a horse.
What shape is a ball? = A ball is round.
How many sides does a square have? = A square has four sides.
How many sides does a triangle have? = A triangle has three sides.
What is a baby dog called? | What is a baby dog? = A baby dog is a puppy.
What is a baby cat called? | What is a baby cat? = A baby cat is a kitten.
What is a baby cow called? | What is a baby cow? = A baby cow is a calf.
What is a baby sheep called? | What is a baby sheep? = A baby sheep is a lamb.
"""

CAPITALS = """
France Paris; Germany Berlin; Italy Rome; Spain Madrid; England London; Ireland Dublin; Portugal Lisbon; Greece Athens;
Austria Vienna; Hungary Budapest; Poland Warsaw; Sweden Stockholm; Norway Oslo; Finland Helsinki; Denmark Copenhagen;
Russia Moscow; Japan Tokyo; China Beijing; Egypt Cairo; Cuba Havana; Peru Lima; Kenya Nairobi; Canada Ottawa;
Turkey Ankara; Belgium Brussels
"""

OPPOSITES = """
hot cold; big small; tall short; fast slow; old young; new old; good bad; happy sad; light dark; day night; up down;
left right; open closed; full empty; hard soft; wet dry; rich poor; strong weak; early late; near far; high low;
long short; black white; loud quiet; clean dirty; easy hard; heavy light; thick thin; wide narrow; deep shallow;
first last; begin end; start stop; love hate; laugh cry; win lose; buy sell; give take; push pull; come go; in out;
on off; over under; above below; before after; always never; yes no; true false; right wrong; north south; east west;
summer winter; morning evening; front back; inside outside; friend enemy; war peace; question answer; sweet sour;
brave afraid; sharp dull; smooth rough; cheap expensive; safe dangerous; simple difficult; asleep awake; alive dead;
warm cool; bright dim; tight loose; arrive leave; remember forget; build destroy; rise fall; king queen; boy girl;
man woman; father mother; brother sister; son daughter
"""


def entries(text: str) -> list[tuple[list[str], str]]:
    """(ways to ask, answer) of each line."""
    lines = [line.split(" = ") for line in text.strip().splitlines()]
    return [([q.strip() for q in asked.split(" | ")], answer.strip()) for asked, answer in lines]


def table(text: str) -> list[tuple[str, str]]:
    """Two words each, set apart by semicolons."""
    rows = (item.split() for item in text.replace("\n", " ").split(";"))
    return [(a, b) for a, b in rows]
