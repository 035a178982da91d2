"""Text for chats: words of everyday English in no meaningful order, the same for the same name.

Common short words are one token in most models' vocabularies, and so is a full stop: a text of so
many of both has about as many tokens. How many exactly, only the server's usage says.
"""

from __future__ import annotations

from loadtest.vocabulary import Vocabulary
from loadtest.workloads.randomness import random_tokens

_SENTENCE = 12
"""Words of a sentence, its full stop included."""

_WORDS = """
able about above across act add after again age ago air all almost alone along also always among
animal answer any apple area arm around arrive art ask away back bad bag ball bank base bath be
bear beat because become bed before begin behind believe bell below best better between big bird
black blue board boat body bone book born both bottom box boy bread break bridge bright bring
brother brown build burn bus busy buy by cake call calm camp can capital car card care carry case
cat catch cause center chair chance change cheap check child choose church city class clean clear
climb clock close cloth cloud coast coat coffee cold color come common cook cool copy corn corner
correct cost could count country course cover cow cross cry cup cut dance dark daughter day dead
deal deep desk dinner direct dish do doctor dog door doubt down draw dream dress drink drive drop
dry during dust each ear early earth east easy eat edge effect egg eight either else empty end
engine enjoy enough enter equal even evening ever every exact example eye face fact fair fall
family far farm fast father fear feed feel few field fight fill find fine finger finish fire first
fish fit five flat floor flow flower fly follow food foot force forest forget form four free fresh
friend from front fruit full game garden gas gate gather gave general gentle get gift girl give
glad glass go gold gone good grass gray great green ground group grow guess guide hair half hall
hand happen happy hard hat have head hear heart heat heavy help here high hill history hold hole
home hope horse hospital hot hotel hour house how human hundred hunt hurry ice idea if inside iron
island job join jump just keep key kill kind king kitchen knee knife know lady lake land large last
late laugh law lay lead learn least leave left leg less let letter level lie life lift light like
line list listen little live local lock long look lose lost lot loud love low luck lunch machine
main make man many map mark market master matter may meal mean measure meat meet member metal
middle might mile milk mind minute miss mix model modern moment money month moon more morning most
mother motion mountain mouth move much music must name nation nature near neck need never new next
nice night nine noise none noon north nose note nothing notice now number object ocean off offer
office often oil old on once one only open orange order other our out outside over own page paint
pair paper parent park part party pass past path pay peace pen people perhaps period person picture
piece place plain plan plane plant play please point poor port position post pound power press
pretty price prize problem produce public pull push put queen question quick quiet quite race radio
rain raise reach read ready real reason receive record red remember repeat reply rest result return
rice rich ride right ring rise river road rock roll roof room root rope rose round row rule run
safe sail salt same sand save say scale school science score sea search season seat second see seed
seem sell send sense serve set seven several shade shape share sharp she sheep sheet shelf ship
shirt shoe shop short should shoulder show shut sick side sign silent silver simple since sing
sister sit six size skin sky sleep slow small smell smile snow so soap soft soil soldier some son
song soon sort sound soup south space speak special speed spell spend spoke spoon sport spot spring
square stage stand star start state station stay steel step still stone stop store storm story
straight strange street strong student study such sugar summer sun support sure surface sweet swim
table tail take talk tall taste teach team tell ten test than thank that then there thick thin
thing think third this thousand three through throw ticket tie time tiny tire today together told
tomorrow tone tool tooth top total touch toward town track trade train travel tree trip true try
turn twelve twenty two type uncle under unit until up upon use valley value very view village visit
voice wait walk wall want warm wash watch water wave way wear weather week weight well west wheel
when where which while white who whole why wide wife wild will wind window winter wish with without
woman wonder wood word work world worth would write wrong yard year yellow yes yesterday yet you
young zero
"""
WORDS = tuple(_WORDS.split())


def text(name: str, words: int) -> str:
    """So many words and full stops together, at least one."""
    places = random_tokens(f"text/{name}", words, Vocabulary(0, len(WORDS)))
    chosen = [WORDS[place] for place in places]
    return " ".join(
        _sentence(chosen[start : start + _SENTENCE]) for start in range(0, words, _SENTENCE)
    )


def _sentence(words: list[str]) -> str:
    """A full stop takes the place of the last word, unless it is the only one."""
    if len(words) == 1:
        return words[0].capitalize()
    return " ".join(words[:-1]).capitalize() + "."
