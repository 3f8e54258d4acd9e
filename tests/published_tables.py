"""Small copies of the data sets of datasets_tables.yaml, whose index files tell labels and splits."""

from itertools import pairwise

import numpy as np
from published import encode, encoded, picture, tarred, write, zipped

JUNK = b"no image"


def numbered(*counts: int) -> list[range]:
    """Consecutive ranges of picture numbers, so many each."""
    ends = np.cumsum(counts).tolist()
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def listed(lines: list[str], end="\n") -> str:
    """A text file, whose last line lacks its end, as happens."""
    return end.join(lines)


def permuted(rows: list, seed: int, *shares: float) -> list[list]:
    """Parts of a permutation: the truncated shares, and what they leave."""
    order = np.random.default_rng(seed).permutation(len(rows))
    ends = [*np.cumsum([0, *(int(share * len(rows)) for share in shares)]), len(rows)]
    return [[rows[i] for i in order[begin:end]] for begin, end in pairwise(ends)]


def cvc_muscima(folder):
    train, test = numbered(10, 4)
    names = {number: f"w-{number % 3 * 20 + 1:02}/p{number + 1:03}.png" for number in (*train, *test)}
    kinds = {"Gray": 0, "BW": 30, "NoStaff": 40}  # the pictures of the other kinds must not be taken
    lists = {"training": listed([names[n] for n in train], "\r\n"),
             "testing": listed([*(names[n] for n in test), "w-50/p020.png"], "\r\n")}  # the last one is not there
    other = {"training": lists["testing"], "testing": lists["training"]}
    write(folder, {
        "CVCMUSCIMA_WI.zip": zipped({f"CVCMUSCIMA_WI/PNG_GT_{kind}/{name}": encode(number + more, mode="L")
                                     for kind, more in kinds.items() for number, name in names.items()}),
        "Partitions_Set.zip": zipped({f"Partitions_Set/{group}/{start}_{part}_{fold}.txt": files[part] for part in lists
                                      for group, start, fold, files in (("set_2_Independent", "set_2", "01", lists),
                                                                        ("set_2_Independent", "set_2", "02", other),
                                                                        ("set_1_Constrained", "set_1", "01", other))})})
    return {"train": [(n, n % 3 * 20) for n in train], "test": [(n, n % 3 * 20) for n in test]}


def wiki_paintings_style(folder):
    styles = {"Ukiyo_e": 26, "Baroque": 4}
    train, test = numbered(8, 3)
    names = {n: f"{list(styles)[n % 2]}/artist_the-title-{n}.jpg" for n in (*train, *test)}
    listed_as = names | {2: "Ukiyo_e/josé, the-elder_2.jpg", 3: "Baroque/Upper_3.JPG"}
    packed_as = names | {2: "Ukiyo_e/jos├⌐, the-elder_2.jpg", 3: "Baroque/upper_3.jpg"}  # é in a zip that tells no encoding

    def table(numbers):
        return listed([(f'"{listed_as[n]}"' if n == 2 else listed_as[n]) + f",{list(styles.values())[n % 2]}" for n in numbers],
                      "\r\n")

    write(folder, {
        "wikiart.zip": zipped({"wikiart/Cubism/b.jpg": JUNK, **{f"wikiart/{packed_as[n]}": encode(n, "JPEG") for n in names}}),
        "wikiart_csv.zip": zipped({"wikiart_csv/style_train.csv": table(train), "wikiart_csv/style_val.csv": table(test),
                                   "wikiart_csv/artist_train.csv": "Cubism/b.jpg,3", "wikiart_csv/style_class.txt": "0 a"})})
    return {"train": [(n, [26, 4][n % 2]) for n in train], "test": [(n, [26, 4][n % 2]) for n in test]}


def mit_scenes(folder):
    classes = ["airport_inside", "kindergarden", "stairscase"]
    train, test, others = numbered(9, 3, 2)
    names = {n: f"{classes[n % 3]}/scene_{n}.jpg" for n in (*train, *test, *others)} | {4: "kindergarden/two words 4.JPG"}
    write(folder, {"indoor-scenes-cvpr-2019.zip": zipped({
        "TrainImages.txt": listed([names[n] for n in train]),
        "TestImages.txt": listed([names[n] for n in test]),
        **{f"indoorCVPR_09/Images/{name}": encode(n, "GIF" if n == 5 else "JPEG") for n, name in names.items()},
        **{f"indoorCVPR_09annotations/Annotations/{name[:-4]}.xml": "<annotation/>" for name in names.values()}})})
    return {"train": [(n, n % 3) for n in train], "test": [(n, n % 3) for n in test]}


def caltech_birds2011(folder):
    birds = {1: "001.Black_footed_Albatross", 2: "002.Laysan_Albatross", 200: "200.Common_Yellowthroat"}
    rows = [(n, list(birds)[n // 5]) for n in range(15)]  # sorted by class, ids begin at 1
    paths = {n: f"{birds[label]}/Bird_{n:04}.jpg" for n, label in rows}
    test = {0, 7, 11}
    write(folder, {"CUB_200_2011.tgz": tarred({
        "attributes.txt": "1 has_bill_shape::curved",
        "CUB_200_2011/images.txt": listed([f"{n + 1} {paths[n]}" for n, label in rows]),
        "CUB_200_2011/image_class_labels.txt": listed([f"{n + 1} {label}" for n, label in reversed(rows)]),
        "CUB_200_2011/train_test_split.txt": listed([f"{n + 1} {int(n not in test)}" for n, label in rows]),
        "CUB_200_2011/classes.txt": listed([f"{label} {bird}" for label, bird in birds.items()]),
        "CUB_200_2011/bounding_boxes.txt": listed([f"{n + 1} 60.0 27.0 325.0 304.0" for n, label in rows]),
        "CUB_200_2011/attributes/image_attribute_labels.txt": "1 1 0 3 27.7",
        **{f"CUB_200_2011/images/{paths[n]}": encode(n, "JPEG") for n, label in rows}}, "gz")})
    train, dev, dev_test = permuted([(n, label - 1) for n, label in rows if n not in test], 0, 0.7, 0.15)
    return {"train": train, "dev": dev, "dev_test": dev_test, "test": [(n, label - 1) for n, label in rows if n in test]}


def fgvc_aircraft_family(folder):
    families = {"A300": 0, "C-130": 20, "C-47": 21, "Embraer Legacy 600": 42, "F/A-18": 45, "Yak-42": 69}
    names, ids = list(families), list(families.values())
    train, test = numbered(12, 6)
    lines = {n: f"{1000000 + n:07} {names[n % 6]}" for n in (*train, *test)} | {0: "0034309 A300"}
    data = "fgvc-aircraft-2013b/data"
    write(folder, {"fgvc-aircraft-2013b.tar.gz": tarred({
        f"{data}/families.txt": listed(names),
        f"{data}/images_family_train.txt": listed([lines[n] for n in train[:6]]),
        f"{data}/images_family_val.txt": listed([lines[n] for n in train[6:]]),
        f"{data}/images_family_trainval.txt": listed([lines[n] for n in train]) + "\n",
        f"{data}/images_family_test.txt": listed([lines[n] for n in test]) + "\n",
        f"{data}/images_variant_test.txt": listed([f"{1000000 + n} Variant {n}" for n in test]),
        **{f"{data}/images/{line[:7]}.jpg": encode(n, "JPEG") for n, line in lines.items()}}, "gz")})
    return {"train": [(n, ids[n % 6]) for n in train], "test": [(n, ids[n % 6]) for n in test]}


def dtd(folder):
    classes = ["banded", "polka-dotted", "zigzagged"]
    parts = dict(zip(("train", "val", "test"), numbered(12, 4, 4), strict=True))
    names = {n: f"{classes[n % 3]}/{classes[n % 3]}_{n:04}.jpg" for numbers in parts.values() for n in numbers}
    lists = {name: sorted(numbers, key=names.get) for name, numbers in parts.items()}
    write(folder, {"dtd-r1.0.1.tar.gz": tarred({  # not compressed, whatever its name says
        **{f"dtd/labels/{name}1.txt": listed([names[n] for n in numbers]) for name, numbers in lists.items()},
        **{f"dtd/labels/{name}10.txt": listed([*names.values()]) for name in lists},
        "dtd/labels/labels_joint_anno.txt": "banded/banded_0002.jpg banded", "dtd/imdb/imdb.mat": JUNK,
        **{f"dtd/images/{name}": encode(n, "JPEG") for n, name in names.items()}})})
    rows = {name: [(n, n % 3) for n in numbers] for name, numbers in lists.items()}
    train, dev = permuted(rows["train"], 0, 0.8)
    return {"train": train, "dev": dev, "dev_test": rows["val"], "test": rows["test"]}


def oxford_iiit_pet(folder):
    breeds = {"Abyssinian": 1, "american_bulldog": 2, "yorkshire_terrier": 37}
    names = {n: f"{list(breeds)[n // 5]}_{n % 5 + 1}" for n in range(15)}
    lines = {n: f"{name} {list(breeds.values())[n // 5]} 1 1" for n, name in names.items()}
    test = [2, 8, 12]
    pool = [n for n in names if n not in test]
    kinds = {3: "PNG", 6: "GIF", 9: "BMP"}
    write(folder, {
        "images.tar.gz": tarred({f"images/{name}.jpg": encode(n, kinds.get(n, "JPEG")) for n, name in names.items()}
                                | {"images/Abyssinian_1.mat": JUNK, "images/unlisted_1.jpg": encode(99, "JPEG")}, "gz"),
        "annotations.tar.gz": tarred({
            "annotations/list.txt": "#Image CLASS-ID SPECIES BREED ID\nAbyssinian_100 1 1 1",
            "annotations/trainval.txt": listed([lines[n] for n in pool]),
            "annotations/test.txt": listed([lines[n] for n in test]),
            "annotations/trimaps/._Abyssinian_1.png": JUNK,
            **{f"annotations/trimaps/{name}.png": encode(1) for name in names.values()}}, "gz")})
    train, dev, dev_test = permuted([(n, (0, 1, 36)[n // 5]) for n in pool], 0, 0.7, 0.15)
    return {"train": train, "dev": dev, "dev_test": dev_test, "test": [(n, (0, 1, 36)[n // 5]) for n in test]}


def interact(folder):
    classes = {7: "dance with", 3: "argue with", 60: "wrestle with"}  # drawn in the order of their first rows
    labels = [list(classes)[n % 3] for n in range(60)]
    rows = [f"{label};photo_{n:02}.jpg;{classes[label]}" for n, label in enumerate(labels)]
    illustrations = [(60 + i, label) for i, label in enumerate(classes)]
    broken = ("22TCSTMOFXRDFDVIK9PDTXJK5OZTQ6_20.jpg", "249YW2GTP9RAU1I25WX94SOKQN6OTI_16.jpg",
              "24PFCD45XCETAM5TCF9N9TGUNNTZXA_02.jpg")
    archive = "interact_{}_dataset_{}.zip".format
    write(folder, {
        archive("stand-alone", "annotations"): zipped({
            "interact_final_dataset_labels_and_images.txt":
                listed([rows[0], *(f"3;{name};argue with" for name in broken), *rows[1:]])}),
        archive("stand-alone", "images"): zipped({f"imgs/photo_{n:02}.jpg": encode(n, "JPEG") for n in range(60)}
                                                 | {f"imgs/{name}": encode(99, "JPEG")[:-40] for name in broken}),
        archive("illustration_category", "annotations"): zipped({
            "interact_illustration_category_dataset_labels_and_images.txt":
                listed([f"{label};art_{n}.png;{classes[label]}" for n, label in illustrations])}),
        archive("illustration_category", "images"): zipped({f"imgs/art_{n}.png": encode(n) for n, label in illustrations})})
    random, parts = np.random.default_rng(1), {"train": [], "dev": [], "dev_test": [], "test": []}
    for label in classes:
        members = [n for n in range(60) if labels[n] == label]
        members = [members[i] for i in random.permutation(20)]
        for part, (begin, end) in zip(parts.values(), [(0, 11), (11, 13), (13, 15), (15, 20)], strict=True):
            part += [(n, label - 1) for n in members[begin:end]]
    parts["train"] += [(n, label - 1) for n, label in illustrations]
    return parts


def celeb_a(folder):
    numbers = dict(zip("012", numbered(10, 3, 3), strict=True))  # 0 train, 1 validation, 2 test
    on = {n: sorted({n % 40, 39 - n, 20}) if n else [] for part in numbers.values() for n in part}
    flags = {n: " ".join(" 1" if i in on[n] else "-1" for i in range(40)) for n in on}
    write(folder, {
        "img_align_celeba.zip": zipped({f"img_align_celeba/{n + 1:06}.jpg": encode(n, "JPEG") for n in on}),
        "list_attr_celeba.txt": listed(["202599", " ".join(f"Attribute_{i}" for i in range(40)) + " ",
                                        *(f"{n + 1:06}.jpg {flags[n]} " for n in on), f"000099.jpg {flags[0]}"], "\r\n"),
        "list_eval_partition.txt": listed([f"{n + 1:06}.jpg {part}" for part, those in numbers.items() for n in those]) + "\n"})
    return {name: [(n, tuple(on[n])) for n in numbers[part]]
            for name, part in (("train", "0"), ("dev_test", "1"), ("test", "2"))}


def mnist_m(folder):
    parts = {"train": [*range(10), 3, 4], "test": [*range(10, 16), 5]}  # both folders count from 0; copies at their ends
    labels = {"train": [n % 10 for n in range(10)] + [3, 9], "test": [n % 10 for n in range(10, 16)] + [5]}
    members = {}
    for name, pictures in parts.items():
        members |= {f"mnist_m/mnist_m_{name}/{i:08}.png": encode(n, size=(32, 32)) for i, n in enumerate(pictures)}
        members[f"mnist_m/mnist_m_{name}_labels.txt"] = listed([f"{i:08}.png {d}" for i, d in enumerate(labels[name])])
    write(folder, {"mnist_m.tar.gz": tarred(members, "gz")})
    # 3 and 5 are exact copies; 4 with another label is none
    return {"train": [*((n, n) for n in range(10)), (4, 9), *((n, n - 10) for n in range(10, 16))]}


def melanoma(folder):
    marks = ["1.0,0.0", "0.0,1.0", "0.0,0.0"]
    parts = dict(zip(("Training", "Validation", "Test_v2"), numbered(12, 3, 4), strict=True))
    for name, numbers in parts.items():
        data = f"ISIC-2017_{name}_Data"
        write(folder, {
            f"{data}.zip": zipped({f"{data}/ISIC_{n:07}.jpg": encode(n, "JPEG") for n in numbers}
                                  | {f"{data}/ISIC_{n:07}_superpixels.png": encode(99) for n in numbers}
                                  | {f"{data}/{data}_metadata.csv": "image_id,age_approximate,sex\nISIC_0000000,55,female"}),
            f"ISIC-2017_{name}_Part3_GroundTruth.csv": listed(
                ["image_id,melanoma,seborrheic_keratosis", *(f"ISIC_{n:07},{marks[n % 3]}" for n in numbers)], "\r\n")})
    rows = [[(n, n % 3) for n in numbers] for numbers in parts.values()]
    train, dev = permuted(rows[0], 1, 0.8)
    return {"train": train, "dev": dev, "dev_test": rows[1], "test": rows[2]}


def food101(folder):
    foods = ["apple_pie", "beef_carpaccio", "waffles"]
    train, test = numbered(9, 3)
    names = {n: f"{foods[n % 3]}/{100000 + n}" for n in (*train, *test)}
    write(folder, {"food-101.tar.gz": tarred({
        **{f"food-101/images/{name}.jpg": encode(n, "JPEG") for n, name in names.items()},
        "food-101/meta/train.txt": listed([names[n] for n in train]),
        "food-101/meta/test.txt": listed([names[n] for n in test]),
        "food-101/meta/train.json": "{}", "food-101/meta/classes.txt": listed(foods)}, "gz")})
    return {"train": [(n, n % 3) for n in train], "test": [(n, n % 3) for n in test]}


def food101n(folder):
    foods = ["apple_pie", "beef_carpaccio", "waffles"]
    train, test, others = numbered(9, 3, 2)
    names = {n: f"{foods[n % 3]}/{n:032x}.jpg" for n in (*train, *test, *others)}
    release = "Food-101N_release"
    header = "class_name/key\tverification_label"
    write(folder, {f"{release}.zip": zipped({
        **{f"{release}/images/{name}": encode(n, "JPEG") for n, name in names.items()},
        f"{release}/meta/imagelist.tsv": listed(["class_name/key", *names.values()]),
        f"{release}/meta/classes.txt": listed(["class_name", *foods]),
        f"{release}/meta/verified_train.tsv": listed([header, *(f"{names[n]}\t{n % 2}" for n in train)]),
        f"{release}/meta/verified_val.tsv": listed([header, *(f"{names[n]}\t{n % 2}" for n in test)])})})
    return {"train": [(n, n % 3) for n in train], "test": [(n, n % 3) for n in test]}


def domainnet(folder):
    domains = ["real", "painting", "clipart", "quickdraw", "infograph", "sketch"]
    classes = {"aircraft_carrier": 0, "The_Eiffel_Tower": 303, "zigzag": 344}
    rows = {"train": [], "test": []}
    for domain, numbers in zip(domains, numbered(6, 6, 6, 6, 6, 6), strict=True):
        names = {n: f"{domain}/{list(classes)[n % 3]}/{domain}_001_{n:06}.{'png' if domain == 'quickdraw' else 'jpg'}"
                 for n in numbers}
        write(folder, {f"{domain}.zip": zipped({name: encode(n, "PNG" if domain == "quickdraw" else "JPEG")
                                                for n, name in names.items()})})
        for name, those in (("train", numbers[:4]), ("test", numbers[4:])):
            rows[name].append([(n, list(classes.values())[n % 3]) for n in those])
            write(folder, {f"{domain}_{name}.txt": listed([f"{names[n]} {label}" for n, label in rows[name][-1]]) + "\n"})
    return {"train": sum(rows["train"][:5], []), "dev": sum(rows["test"][:5], []), "dev_test": rows["train"][5],
            "test": rows["test"][5]}


def nih_chest_xray(folder):
    findings = {"No Finding": (14,), "Emphysema|Cardiomegaly": (5, 10), "Hernia": (13,), "Atelectasis|Effusion": (0, 7)}
    train, test = numbered(9, 4)
    names = {n: f"{n // 2 + 1:08}_{n % 2:03}.png" for n in (*train, *test)}
    gray = {n: picture(n, mode="L") for n in names}
    rgba = np.dstack([gray[3]] * 3 + [np.full_like(gray[3], 255)])
    write(folder, {"data.zip": zipped({
        "Data_Entry_2017.csv": listed(["Image Index,Finding Labels,Follow-up #,Patient ID,OriginalImage[Width,Height],",
                                       *(f"{name},{list(findings)[n % 4]},0,{n // 2 + 1},2682,2749,"
                                         for n, name in names.items())]),
        "train_val_list.txt": listed([names[n] for n in train]), "test_list.txt": listed([names[n] for n in test]),
        "BBox_List_2017.csv": "Image Index,Finding Label\n00000001_000.png,Mass", "README_CHESTXRAY.pdf": JUNK,
        "__MACOSX/images_001/._x.png": JUNK, "images_001/images/.DS_Store": JUNK,
        **{f"images_{n // 5 + 1:03}/images/{name}": encoded(rgba if n == 3 else gray[n]) for n, name in names.items()}})})
    labels = list(findings.values())
    return {"train": [(n, labels[n % 4]) for n in train], "test": [(n, labels[n % 4]) for n in test]}


LAYOUTS = {layout.__name__: layout for layout in (
    cvc_muscima, wiki_paintings_style, mit_scenes, caltech_birds2011, fgvc_aircraft_family, dtd, oxford_iiit_pet, interact,
    celeb_a, mnist_m, melanoma, food101, food101n, domainnet, nih_chest_xray)}
MODES = {"cvc_muscima": "L", "nih_chest_xray": "L"}
