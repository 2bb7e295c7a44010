"""Makers of conversations in other languages, and of translations."""

from __future__ import annotations

from datetime import date, timedelta
from typing import NamedTuple

from desk import Desk, Dialogue, Turns
from writing import long, weekday, words


class Language(NamedTuple):
    """Questions and answers in one language.

    `small` has pairs of a question and an answer with nothing to compute.
    """

    days: str
    months: str
    date: str
    weekday: tuple[str, str]
    product: tuple[str, str]
    minutes: tuple[str, str]
    then: str
    small: tuple[tuple[str, str], ...]


LANGUAGES = {
    "de": Language(
        "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag",
        "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
        "{d}. {m} {y}",
        ("Welcher Wochentag ist der {date}?", "Der {date} ist ein {day}."),
        (
            "Was ist {a} mal {b}?",
            "Ich zerlege {b} in {t} und {o}: {a} × {t} = {at}, {a} × {o} = {ao}. Zusammen ergibt das {at} + {ao} = "
            "{c}.",
        ),
        (
            "Wie viele Minuten sind {h} Stunden und {n} Minuten?",
            "Eine Stunde hat 60 Minuten: {h} × 60 = {hm}, und {hm} + {n} = {all}. Es sind {all} Minuten.",
        ),
        "Und {n} Tage später?",
        (
            (
                "Was ist der Unterschied zwischen „seit“ und „seid“?",
                "„Seit“ bezeichnet eine Zeit: Ich wohne seit März hier. „Seid“ ist eine Form von „sein“: Ihr seid "
                "pünktlich. Merkhilfe: seit mit t wie Zeit.",
            ),
            (
                "Schreib mir bitte eine kurze Absage für eine Einladung zum Abendessen.",
                "Liebe Jolanta, vielen Dank für die Einladung! Leider bin ich am Freitag schon verabredet. Ich würde "
                "mich freuen, wenn wir das Essen bald nachholen. Herzliche Grüße",
            ),
            (
                "Wie halte ich Basilikum am Leben?",
                "Stell ihn hell, aber nicht in die Mittagssonne, gieße von unten, sobald die Erde oben trocken ist, "
                "und schneide ganze Triebe über einem Blattpaar ab, statt einzelne Blätter zu zupfen. Dann treibt er "
                "neu aus.",
            ),
        ),
    ),
    "fr": Language(
        "lundi mardi mercredi jeudi vendredi samedi dimanche",
        "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
        "{d} {m} {y}",
        ("Quel jour de la semaine est le {date} ?", "Le {date} est un {day}."),
        (
            "Combien font {a} fois {b} ?",
            "On décompose {b} en {t} et {o} : {a} × {t} = {at} et {a} × {o} = {ao}. En tout, {at} + {ao} = {c}.",
        ),
        (
            "Combien de minutes y a-t-il dans {h} heures et {n} minutes ?",
            "Une heure compte 60 minutes : {h} × 60 = {hm}, puis {hm} + {n} = {all}. Cela fait {all} minutes.",
        ),
        "Et {n} jours plus tard ?",
        (
            (
                "Quelle est la différence entre « an » et « année » ?",
                "« An » compte les unités : elle a dix ans. « Année » insiste sur la durée ou le contenu : une année "
                "difficile, toute l'année.",
            ),
            (
                "Pourquoi faut-il rincer le riz avant de le cuire ?",
                "Le rinçage enlève l'amidon resté à la surface des grains. Le riz colle moins et l'eau de cuisson "
                "reste plus claire. Pour un risotto, au contraire, on garde cet amidon, car il lie la sauce.",
            ),
            (
                "Rédige un petit mot pour prévenir mes voisins d'une fête.",
                "Chers voisins, samedi soir je fête mon anniversaire. Il y aura un peu de musique jusqu'à minuit. Si "
                "le bruit vous gêne, sonnez chez moi, ou mieux : venez prendre un verre !",
            ),
        ),
    ),
    "es": Language(
        "lunes martes miércoles jueves viernes sábado domingo",
        "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
        "{d} de {m} de {y}",
        ("¿Qué día de la semana es el {date}?", "El {date} es {day}."),
        (
            "¿Cuánto es {a} por {b}?",
            "Separamos {b} en {t} y {o}: {a} × {t} = {at} y {a} × {o} = {ao}. Sumamos: {at} + {ao} = {c}.",
        ),
        (
            "¿Cuántos minutos son {h} horas y {n} minutos?",
            "Una hora tiene 60 minutos: {h} × 60 = {hm}, y {hm} + {n} = {all}. Son {all} minutos.",
        ),
        "¿Y {n} días después?",
        (
            (
                "¿Cuándo se usa «por» y cuándo «para»?",
                "«Para» señala la meta: este libro es para ti, salgo para Lima. «Por» señala la causa o el camino: "
                "gracias por venir, paseamos por el parque.",
            ),
            (
                "¿Cómo sé si un huevo está fresco?",
                "Ponlo en un vaso de agua. Si se queda acostado en el fondo, es fresco; si se levanta un poco, tiene "
                "una o dos semanas; si flota, mejor no lo comas. Con el tiempo entra aire por la cáscara.",
            ),
            (
                "Dame tres ideas para una tarde de lluvia.",
                "1. Cocinar algo que nunca hemos probado.\n2. Ordenar las fotos del último viaje y elegir diez.\n3. "
                "Escribir una carta a mano a alguien que no la espera.",
            ),
        ),
    ),
    "zh": Language(
        "星期一 星期二 星期三 星期四 星期五 星期六 星期日",
        " ".join(str(i) for i in range(1, 13)),
        "{y}年{m}月{d}日",
        ("{date}是星期几？", "{date}是{day}。"),
        ("{a}乘以{b}等于多少？", "把{b}拆成{t}和{o}：{a} × {t} = {at}，{a} × {o} = {ao}。相加得 {at} + {ao} = {c}。"),
        ("{h}小时{n}分钟一共是多少分钟？", "一小时有六十分钟：{h} × 60 = {hm}，{hm} + {n} = {all}。一共{all}分钟。"),
        "再过{n}天呢？",
        (
            (
                "“的”“得”“地”有什么区别？",
                "“的”放在名词前：红色的花。“地”放在动词前：慢慢地走。“得”放在动词后，说明程度：跑得很快。",
            ),
            (
                "怎样泡一杯好喝的绿茶？",
                "水温不要太高，八十度左右就好。先用热水温一下杯子，放入三克茶叶，加水，等两分钟。水太热，茶会变苦。",
            ),
            (
                "用一句话解释什么是回收利用。",
                "回收利用就是把用过的材料收集起来，加工以后再做成新的东西，这样可以节约资源，也可以减少垃圾。",
            ),
        ),
    ),
    "ja": Language(
        "月曜日 火曜日 水曜日 木曜日 金曜日 土曜日 日曜日",
        " ".join(str(i) for i in range(1, 13)),
        "{y}年{m}月{d}日",
        ("{date}は何曜日ですか。", "{date}は{day}です。"),
        (
            "{a}かける{b}はいくつですか。",
            "{b}を{t}と{o}に分けます。{a} × {t} = {at}、{a} × {o} = {ao}です。合わせて {at} + {ao} = {c} になります。",
        ),
        ("{h}時間{n}分は何分ですか。", "一時間は六十分です。{h} × 60 = {hm}、{hm} + {n} = {all} なので、{all}分です。"),
        "その{n}日後は？",
        (
            (
                "「は」と「が」の違いを簡単に教えてください。",
                "「は」は話題を示します。「私は学生です」では、私について話しています。「が」は新しい情報を示します。「誰が来ましたか」「田中さんが来ました」のように使います。",
            ),
            (
                "雨の日に家でできることを三つ教えてください。",
                "一つ目は、読みかけの本を最後まで読むことです。二つ目は、古い写真を整理することです。三つ目は、時間のかかる料理を作ることです。",
            ),
            (
                "友達に遅れることを伝える短い文を書いてください。",
                "ごめん、電車が遅れていて、十五分ぐらい遅くなりそうです。先にお店に入っていてください。",
            ),
        ),
    ),
    "ar": Language(
        "الاثنين الثلاثاء الأربعاء الخميس الجمعة السبت الأحد",
        "يناير فبراير مارس أبريل مايو يونيو يوليو أغسطس سبتمبر أكتوبر نوفمبر ديسمبر",
        "{d} {m} {y}",
        ("ما هو يوم الأسبوع الموافق {date}؟", "{date} هو يوم {day}."),
        (
            "كم يساوي {a} ضرب {b}؟",
            "نقسم {b} إلى {t} و {o}: {a} × {t} = {at} ثم {a} × {o} = {ao}. المجموع: {at} + {ao} = {c}.",
        ),
        (
            "كم دقيقة في {h} ساعات و {n} دقيقة؟",
            "في الساعة 60 دقيقة: {h} × 60 = {hm} ثم {hm} + {n} = {all}. الجواب بالدقائق: {all}.",
        ),
        "وماذا بعد {n} يومًا؟",
        (
            (
                "كيف أحفظ الخبز طازجًا؟",
                "ضعه في كيس من القماش في مكان جاف بعيدًا عن الشمس. إذا أردت حفظه أكثر من يومين فقطعه وضعه في المجمد.",
            ),
            (
                "اكتب لي رسالة شكر قصيرة لمعلمتي.",
                "معلمتي العزيزة، شكرًا لك على صبرك وتشجيعك هذا العام. تعلمت منك الكثير، وسأتذكر دروسك دائمًا.",
            ),
            (
                "لماذا ننام؟",
                "في النوم يرتاح الجسم ويصلح نفسه، ويرتب الدماغ ما تعلمناه خلال النهار. من لا ينام جيدًا يصعب عليه "
                "التركيز والتذكر.",
            ),
        ),
    ),
    "ru": Language(
        "понедельник вторник среда четверг пятница суббота воскресенье",
        "января февраля марта апреля мая июня июля августа сентября октября ноября декабря",
        "{d} {m} {y} года",
        ("Какой день недели — {date}?", "{date} — это {day}."),
        (
            "Сколько будет {a} умножить на {b}?",
            "Разложим {b} на {t} и {o}: {a} × {t} = {at}, {a} × {o} = {ao}. Вместе {at} + {ao} = {c}.",
        ),
        (
            "Перевести в минуты: {h} ч {n} мин.",
            "В одном часе 60 минут: {h} × 60 = {hm}, затем {hm} + {n} = {all}. Ответ: {all} мин.",
        ),
        "А через {n} дн.?",
        (
            (
                "Чем отличаются слова «одеть» и «надеть»?",
                "Одевают кого-то: одеть ребёнка. Надевают что-то: надеть пальто. Можно запомнить так: одеть Надежду, "
                "надеть одежду.",
            ),
            (
                "Как сварить гречку, чтобы она была рассыпчатой?",
                "На один стакан крупы нужно два стакана воды. Промойте крупу, доведите до кипения, убавьте огонь, "
                "накройте крышкой и не мешайте. Через пятнадцать минут снимите с огня и дайте постоять.",
            ),
            (
                "Напиши короткое объявление о пропавшей кошке.",
                "Пропала серая кошка с белыми лапами, зовут Муся. В последний раз её видели у старой мельницы. Если "
                "вы её встретите, позвоните, пожалуйста: 555-0142.",
            ),
        ),
    ),
}


def foreign(d: Desk) -> Dialogue:
    lang = d.deal("lang", tuple(LANGUAGES))
    how = LANGUAGES[lang]
    names, months = words(how.days), words(how.months)

    def written(day: date) -> str:
        return how.date.format(d=day.day, m=months[day.month - 1], y=day.year)

    turns: Turns = []
    for kind in d.some(["day", "product", "minutes", "small"], d.between(1, 3)):
        if kind == "day":
            day = d.day().replace(day=d.between(2, 28))
            turns.append(
                (
                    how.weekday[0].format(date=written(day)),
                    how.weekday[1].format(date=written(day), day=names[day.weekday()]),
                )
            )
            if d.chance(0.5):
                n = d.between(11, 99)
                day += timedelta(n)
                if day.day > 1:
                    turns.append(
                        (how.then.format(n=n), how.weekday[1].format(date=written(day), day=names[day.weekday()]))
                    )
        elif kind == "product":
            a, t, o = d.between(12, 79), d.between(1, 8) * 10, d.between(2, 9)
            b = t + o
            turns.append(
                (
                    how.product[0].format(a=a, b=b),
                    how.product[1].format(a=a, b=b, t=t, o=o, at=a * t, ao=a * o, c=a * b),
                )
            )
        elif kind == "minutes":
            h, n = d.between(3, 9), d.between(11, 58)
            turns.append((how.minutes[0].format(h=h, n=n), how.minutes[1].format(h=h, n=n, hm=h * 60, all=h * 60 + n)))
        else:
            turns.append(d.deal(f"small {lang}", how.small))
    return Dialogue(turns, turns[0][1], lang)


def translation(d: Desk) -> Dialogue:
    day = d.day(2020, 2040).replace(day=d.between(2, 28))
    codes = d.some(("de", "fr", "es", "ru"), 2)
    english = {"de": "German", "fr": "French", "es": "Spanish", "ru": "Russian"}
    turns: Turns = []
    for lang in codes:
        how = LANGUAGES[lang]
        there = how.date.format(d=day.day, m=words(how.months)[day.month - 1], y=day.year)
        line = how.weekday[1].format(date=there, day=words(how.days)[day.weekday()])
        turns.append(
            (
                f'Translate into {english[lang]}: "{long(day)} is a {weekday(day)}."'
                if not turns
                else d.pick([f"And in {english[lang]}?", f"{english[lang]} too, please."]),
                line,
            )
        )
    return Dialogue(turns, turns[0][1])
