#include "builtin_text.h"

namespace qmlp::cli {

std::string_view builtin_text() {
  return R"TEXT(A river begins as many small streams. Rain falls on the hills, sinks into moss and gravel, and comes out again as springs that are cold even in summer. Each spring feeds a brook a hand wide; brooks meet under bridges that are only planks, and by the time the water reaches the first village it has a name. The people there say that the river is old, older than the church and older than the road, and they are right: the valley was cut by it, a millimetre a year, for longer than there has been anyone to call it a valley.

In the spring of the year when the mill was sold, the engineer came to measure the flow. She set a wooden frame across the channel, counted how long a cork took to float ten metres, and wrote the figures into a small book: 14.2 seconds, 13.9 seconds, 14.4 seconds. The cross-section was 1.8 square metres, so the flow was about 1.3 cubic metres each second. "That is enough," she said, "for a turbine of sixty kilowatts, if the fall is five metres and you do not waste it." The miller asked what she would do with the old wheel. She thought for a while. "Leave it where it is. It will turn when we need to remember how slow things were."

How does one check such a figure? The power of falling water is its mass each second, times the height, times the acceleration of gravity. With 1300 kilograms each second and 5 metres this gives 1300 * 5 * 9.81 = 63765 watts before losses. A good turbine turns about nine tenths of that into motion, and a good generator loses another twentieth, so what comes out of the wire is close to 54 kilowatts. The engineer had promised sixty, and the miller, who could multiply, noticed.

Questions and answers:
1. What is the capital of France? The capital of France is Paris.
2. How many days does a leap year have? A leap year has 366 days.
3. Which gas do plants take from the air? Plants take carbon dioxide from the air and give back oxygen.
4. Who wrote "Hamlet"? William Shakespeare wrote it around the year 1600.
5. What is the boiling point of water at sea level? It is 100 degrees Celsius, or 212 degrees Fahrenheit.

The following function finds the median of a list without sorting all of it:

def median(values):
    if not values:
        raise ValueError("the median of nothing is not defined")
    k = len(values) // 2
    low, high = list(values), []
    while True:
        pivot = low[len(low) // 2]
        smaller = [v for v in low if v < pivot]
        equal = [v for v in low if v == pivot]
        if k < len(smaller):
            low = smaller
        elif k < len(smaller) + len(equal):
            return pivot
        else:
            k -= len(smaller) + len(equal)
            low = [v for v in low if v > pivot]

And the same idea in C++, for those who prefer the standard library:

#include <algorithm>
#include <vector>

double median(std::vector<double> values) {
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;  // the upper one of the two middle values when their number is even
}

A table of the planets, with their distance from the Sun in millions of kilometres and the length of their year in days:

| planet  | distance | year   |
|---------|----------|--------|
| Mercury | 57.9     | 88.0   |
| Venus   | 108.2    | 224.7  |
| Earth   | 149.6    | 365.2  |
| Mars    | 228.0    | 687.0  |
| Jupiter | 778.5    | 4331   |
| Saturn  | 1432.0   | 10747  |
| Uranus  | 2867.0   | 30589  |
| Neptune | 4515.0   | 59800  |

Die Brücke über den Fluss ist im Winter gesperrt, weil das Eis die Pfeiler beschädigt hat. Wer auf die andere Seite will, muss bis zum nächsten Dorf gehen, wo es eine Fähre gibt. Le pont sera réparé au printemps, dit le maire, mais personne ne sait avec quel argent. El río, mientras tanto, sigue bajando de la montaña como siempre. Мост построили сто лет назад, и с тех пор его чинили трижды. 橋は百年前に建てられました。水は山から海へ流れます。桥很老，但是河更老。

Dear Ms. Alvarez,

Thank you for your letter of 3 March. We have looked at the drawings again and agree that the second pillar must be rebuilt before the summer. The cost, including labour and the hire of a crane for eleven days, comes to 48,250 euros; a detailed list is enclosed. If the council accepts this by the end of the month, the work can begin on 20 April and should be finished in nine weeks. Please note that the road will have to be closed on four Sundays, from six in the morning until eight in the evening.

Yours sincerely,
T. Okafor, civil engineer

When the letter arrived it was raining, and the clerk who opened it read it twice, once quickly and once with a pencil. Then she went down to the archive, where the plans of the first bridge were kept in a drawer that nobody had opened since her grandfather's time. The paper was yellow and smelled of dust. At the lower edge somebody had written, in a careful hand: "The river will always win. Build so that it takes its time." She copied the sentence, put the plan back, and on the next morning the council voted, seven against two, to begin.

{"name": "weir-gauge-7", "interval_s": 600, "unit": "m", "values": [0.412, 0.415, 0.431, 0.478, 0.552, 0.547, 0.501], "alarm": {"low": 0.2, "high": 0.9}, "ok": true}

It is easy to believe that a measurement is a number. It is a number, a unit, a time, a place, an instrument and a person who wanted to know. If one of these is missing, the others soon stop meaning anything. So the engineer kept her small book, and on its first page, under her name, she had written only this: say what you measured, say how, and say what you would have accepted as proof that you were wrong.
)TEXT";
}

}  // namespace qmlp::cli
