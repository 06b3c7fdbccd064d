"""The 40 fixed sentences every run is scored on: 20 of the assistant kind, 20 with varied sounds
(own wording).

They are never spoken in training. Used by `grammar.py` and `score.py`."""

_ASSISTANT = """Hello, how can I help you today?
The time is half past nine.
Two plus three is five.
My favorite color is blue.
The capital of France is Paris.
I am a small model that can talk.
You asked me to say good morning.
The red ball is under the table.
Seven minus four is three.
A week has seven days.
The sun is bright and the sky is clear.
Please speak a little louder.
I heard you say the word apple.
Cats like milk and dogs like bones.
Thank you very much, goodbye.
The weather is cold in winter.
Ten times ten is one hundred.
Water freezes when it is very cold.
I do not know the answer to that.
Tomorrow is another day.""".splitlines()
_VARIED = """The old farmer carried a heavy basket across the bridge.
She found a silver coin beneath the wooden chair.
Fresh bread and butter taste good with hot tea.
A quick brown fox jumped over the lazy dog.
They watched the boats sail past the narrow island.
He wrote a short letter to his younger brother.
The children played in the garden until evening.
Strong winds pushed the clouds toward the mountains.
We bought six oranges and a jar of honey.
The teacher asked a simple question about the river.
Smoke was rising from the chimney of the house.
Her voice was gentle but everyone could hear it.
The train leaves from the third platform at noon.
Birds were singing while the rain fell softly.
A small mouse ran behind the kitchen door.
The doctor gave him medicine for his cough.
Put the yellow book on the highest shelf.
Music from the party kept the neighbors awake.
The judge listened to both sides of the story.
Every summer they travel to the northern coast.""".splitlines()
FIXED = tuple(_ASSISTANT + _VARIED)
