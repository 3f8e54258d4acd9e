"""Small copies of data sets whose labels are told by the names of their files (1)."""

import io

import numpy as np
from published import encode, tarred, write, zipped

STRAY = {"README": "Read me", "Thumbs.db": b"\0", "__MACOSX/._1.jpg": b"\0", "notes/caf\u00e9.txt": "\u00e9"}


def drawing(rows: list, kind="JPEG", mode="RGB", first=0) -> tuple[dict, list]:
    """Members and what a right reader finds, from [(name, label), ...] in the right order: row i is picture `first` + i.

    The members are in the reverse order, behind stray ones.
    """
    members = {name: encode(first + index, kind, mode=mode) for index, (name, _) in enumerate(rows)}
    return STRAY | dict(reversed(members.items())), [(first + index, label) for index, (_, label) in enumerate(rows)]


def grid(names: str, labels, counts) -> list:
    """[(names.format(label word, count), class id), ...] for every label word, which are in the order of their ids."""
    return [(names.format(word, count), label) for label, word in enumerate(labels) for count in counts]


def one_archive(pack, archive: str, rows, kind="JPEG", mode="RGB", stray: dict | None = None):
    """A layout of one archive with `rows`, all of one published split."""
    def layout(folder):
        members, found = drawing(rows, kind, mode)
        write(folder, {archive: pack(members | (stray or {}))})
        return {"train": found}
    return layout


def zipfile(archive, rows, kind="JPEG", mode="RGB", **stray):
    return one_archive(zipped, archive, rows, kind, mode, **stray)


def gzipped_tar(members: dict) -> bytes:
    return tarred(members, "gz")


ABERDEEN = [("adrian1.jpg", 0), ("adrian10.jpg", 0), ("adrian2.JPG", 0), ("chris_harbron3.jpg", 1), ("clean_adrian2.jpg", 0),
            ("heather1.jpg", 2), ("heatherg3.jpg", 2), ("jsheenan1.jpg", 3), ("jsheenang2.jpg", 3), ("kayg4.jpg", 4)]
OLIVETTI = [("100_10.jpg", 9), ("101_41.jpg", 40), ("11_2.jpg", 1), ("12_2.jpg", 1), ("1_1.jpg", 0), ("2_1.jpg", 0),
            ("3_1.jpg", 0), ("4_1.JPG", 0), ("5_1.jpg", 0)]
COIL20 = [(f"coil-20-proc/obj{word}__{pose}.png", word - 1) for word in (10, 1, 20, 2) for pose in (0, 10, 71, 9)]
MPEG7 = grid("original/{}-{}.gif", ("Bone", "HCircle", "apple", "device1"), (1, 10, 2)) + [("original/device10-1.gif", 5),
                                                                                           ("original/device2-1.gif", 4)]
SCENES8 = [("coast_arnat59.jpg", 7), ("coast_n1.jpg", 7), ("forest_bost100.jpg", 3), ("highway_a.jpg", 0),
           ("insidecity_1.jpg", 4), ("mountain_n2.JPG", 6), ("opencountry_3.jpg", 5), ("street_4.jpg", 1),
           ("tallbuilding_art1004.jpg", 2)]
SCENES8 = [(f"spatial_envelope_256x256_static_8outdoorcategories/{name}", label) for name, label in SCENES8]
SCENES15 = [(f"{word}/image_{count:04}.jpg", label)
            for word, label in (("CALsuburb", 1), ("MITcoast", 5), ("PARoffice", 13), ("bedroom", 0), ("store", 14))
            for count in (1, 2)]
CALTECH256 = grid("256_ObjectCategories/{}_{:04}.jpg", ("001.ak47/001", "002.american-flag/002"), (1, 2, 3, 10)) + [
    ("256_ObjectCategories/056.dog/056_0001.jpg", 55), ("256_ObjectCategories/257.clutter/257_0001.jpg", 256)]
CALTECH256_STRAY = {"256_ObjectCategories/198.spider/RENAME2": "mv",
                    "256_ObjectCategories/056.dog/greg/vision309/056_0001.jpg": b"\0"}
UIUC = grid("UIUC/PNGImages/TrainImages/{}-{}.png", ("neg", "pos"), (0, 10, 2, 499))
UIUC_STRAY = {"UIUC/PNGImages/TestImages/test-0.png": b"\0", "UIUC/PNGImages/TestImages_Scale/test-0.png": b"\0",
              "UIUC/Annotations/TrainImages/pos-0.txt": "car"}
FMD = [(f"image/{word}/{word}_{kind}_001_new.jpg", label)
       for word, label in (("fabric", 0), ("foliage", 1), ("stone", 7), ("water", 8), ("wood", 9))
       for kind in ("moderate", "object")]
FMD_STRAY = {"mask/wood/wood_object_001_new.jpg": b"\0", "image/wood/Thumbs.db": b"\0", "crop.m": "x = 1", "old.asv": ""}


def coil100(folder):
    splits = {"train": (0, 10, 350, 355, 5), "dev": (100, 80, 85, 90, 95), "dev_test": (250, 255, 260, 265, 270)}
    angles = sorted(map(str, range(0, 360, 5)))  # in the order of their names
    inside = {str(angle): split for split, group in splits.items() for angle in group}
    rows = [(f"coil-100/obj{word}__{angle}.png", word - 1) for word in (100, 2) for angle in angles]
    members, found = drawing(rows, "PNG")
    write(folder, {"coil-100.zip": zipped(members | {"coil-100/convertGroupppm2png.pl": "#!perl"})})
    published = {name: [] for name in (*splits, "test")}
    for row, angle in zip(found, angles * 2, strict=True):
        published[inside.get(angle, "test")].append(row)
    return published


def butterflies(folder):
    test, test_found = drawing([("admiral/adm014.jpg", 0), ("admiral/adm103.jpg", 0), ("machaon/mch012.JPG", 2),
                                ("zebra/zeb006.jpg", 6)])
    train, train_found = drawing([("admiral/adm001.jpg", 0), ("admiral/adm114.jpg", 0), ("black_swallowtail/swa014.jpg", 1),
                                  ("monarch_closed/mnc001.jpg", 3), ("monarch_open/mno002.jpg", 4), ("peacock/pea002.jpg", 5),
                                  ("zebra/zeb060.jpg", 6), ("zebra/zeb106.jpg", 6)], first=4)
    write(folder, {"butterflies.zip": zipped(test | train)})
    return {"test": test_found, "train": train_found}


def caltech101(folder):
    rows = grid("101_ObjectCategories/{}/image_{:04}.jpg", ("BACKGROUND_Google", "Faces", "accordion"), range(1, 37))
    ids = {0: 1, 1: 2, 2: 0}  # of lower-case words: accordion, background_google, faces
    members, found = drawing([(name, ids[label]) for name, label in rows])
    inner = gzipped_tar(members | {"101_ObjectCategories/BACKGROUND_Google/tmp": ""})
    outer = {"101_ObjectCategories.tar.gz": inner, "Annotations.tar": tarred({"Annotations/Faces/annotation_0001.mat": b"\0"})}
    write(folder, {"caltech-101.zip": zipped({f"caltech-101/{name}": content for name, content in outer.items()})})
    random, pool = np.random.RandomState(1234), []
    for begin in (72, 0, 36):  # classes in the order of their ids
        pool += [found[begin + pick] for pick in random.choice(36, 30, replace=False)]
    rest = [row for row in found if row not in pool]
    pool = [pool[pick] for pick in random.permutation(90)]
    return {"train": pool[:62], "dev": pool[62:75], "dev_test": pool[75:], "test": rest}  # int(0.7 * 90) is 62


def cmu_amp_expression(folder):
    rows = [(f"{word}{count:02}.bmp", label) for word, label in (("A", 0), ("B", 1), ("M", 12)) for count in range(75)]
    members, found = drawing(rows, "BMP", "1")
    write(folder, {"faceExpressionDatabase.zip": zipped(members | {"readme.txt": "13 subjects"})})
    random, splits = np.random.default_rng(1), {"train": [], "dev": [], "dev_test": [], "test": []}
    for begin in (0, 75, 150):
        picks = [found[begin + pick] for pick in random.permutation(75)]
        for name, (start, end) in zip(splits, ((0, 41), (41, 50), (50, 59), (59, 75)), strict=True):
            splits[name] += picks[start:end]
    return splits


def pascal_voc2005(folder):
    train, train_found = drawing([(f"VOC2005_1/PNGImages/{name}.png", label) for name, label in (
        ("Caltech_cars/a", 0), ("Caltech_motorbikes_side/a", 1), ("ETHZ_sideviews-cars/a", 0), ("ETHZ_sideviews-cars/b", 0),
        ("TUGraz_bike/a", 2), ("TUGraz_cars/a", 0), ("TUGraz_person/a", 3), ("TUGraz_person/b", 3))], "PNG")
    test, test_found = drawing([(f"VOC2005_2/PNGImages/{name}.png", label) for name, label in (
        ("INRIA_graz-person-test/a", 3), ("INRIA_inria-person-test/a", 3), ("bicycle/a", 2), ("bike/a", 2), ("car/a", 0),
        ("motocyclette/a", 1), ("motorbike/a", 1), ("motorcycle/a", 1), ("pedestrian/a", 3), ("pieton_2/a", 3), ("velo/a", 2),
        ("voiture/a", 0))], "PNG", first=8)
    stray = {"PNGImages/ETHZ_motorbike-testset/a.png": b"\0", "PNGImages/UIUC_TrainImages/pos-1.png": b"\0",
             "PNGImages/TUGraz_background/a.png": b"\0", "Annotations/car/a.txt": "# PASCAL"}
    for archive, members in (("1", train), ("2", test)):
        members |= {f"VOC2005_{archive}/{name}": content for name, content in stray.items()}
        write(folder, {f"voc2005_{archive}.tar.gz": gzipped_tar(members)})
    return {"train": train_found, "test": test_found}


def caltech_categories(folder):
    found = []
    for archive, inner, label, count in (("Cars_1999", "cars_markus", 0, 3), ("Cars_2001", "cars_brad", 0, 3),
                                         ("motorbikes_side", "motorbikes_side", 1, 4)):
        members, rows = drawing(grid("image_{1:04}.jpg", [label], range(1, count + 1)), first=len(found))
        stray = {"ImageData.mat": b"\0", "notes/no car.jpg.txt": ""}
        write(folder, {f"{archive}.zip": zipped({f"{archive}/{inner}.tar": tarred(members | stray)})})
        found += [(number, label) for number, _ in rows]
    faces, _ = drawing([("image_0001.jpg", 0)])
    write(folder, {"faces.tar": tarred(faces)})
    return {"train": found}


def aloi(folder):
    """Ids of 1, 10 and 1000; several tars with the same folders, of which stereo is left out."""
    tars = {"col": (0, ("i110", "i190", "i250")), "view": (9, ("r0", "r10", "r355")), "ill": (18, ("l1c1", "l8c3"))}
    found = {}
    for tar, (first, codes) in tars.items():
        rows = [(f"png4/{word}/{word}_{code}.png", word - 1) for word in (1, 10, 1000) for code in codes]
        members, found[tar] = drawing(rows, "PNG", first=first)
        write(folder, {f"aloi_red4_{tar}.tar": tarred(members)})
    stereo, _ = drawing([("png4/1/1_c.png", 0), ("png4/1/1_l.png", 0), ("png4/1/1_r.png", 0)], "PNG")
    write(folder, {"aloi_red4_stereo.tar": tarred(stereo)})
    return {"train": found["col"] + found["view"], "test": found["ill"]}


def extended_yaleb(folder):
    poses = ["train", "dev_test", "train", "train", "train", "dev", "test", "train", "test"]
    rows = [(f"ExtendedYaleB/yaleB{word}/yaleB{word}_P{pose:02}A{light}.pgm", label)
            for word, label in ((11, 0), (15, 3), (39, 27))
            for pose in range(9) for light in ("+000E+00", "+070E-35", "-110E+65")]
    members, found = drawing(rows, "PPM", "1")
    for name in ("yaleB11_P00_Ambient.pgm", "yaleB11_P00.info", "yaleB11_P00A+020E-40.pgm.bad"):
        members[f"ExtendedYaleB/yaleB11/{name}"] = b"\0"
    write(folder, {"extended-yale-dataset-b.zip": zipped(members)})
    splits = {name: [] for name in poses}
    for index, row in enumerate(found):
        splits[poses[index // 3 % 9]].append(row)
    return splits


def ig02(folder):
    """Two copies within bikes; a copy with another label stays."""
    found = []
    for label, word in enumerate(("bikes", "cars", "people")):
        members, rows = drawing([(f"{word}/{word}_{count:03}.image.png", label) for count in range(4)], "PNG", first=4 * label)
        members[f"{word}/{word}_000.mask.0.png"] = encode(30, "PNG")
        members[f"{word}_train.txt"] = f"{word}_000\n"
        if word == "bikes":
            members |= {f"bikes/bikes_10{copy}.image.png": encode(0, "PNG") for copy in (0, 1)}
        if word == "people":
            members["people/people_100.image.png"] = encode(0, "PNG")
            rows.append((0, 2))
        write(folder, {f"ig02-v1.0-{word}.zip": zipped(members)})
        found += rows
    return {"train": found}


def ppmi(folder):
    words = [f"{way}_instrument/{instrument}" for way in ("play", "with") for instrument in ("bassoon", "erhu", "violin")]
    train, train_found = drawing(grid("norm_image/{}/train/{}.jpg", words, ("a1", "a2")))
    test, test_found = drawing(grid("norm_image/{}/test/{}.jpg", words, ("b1",)), first=12)
    write(folder, {"norm_ppmi_12class.zip": zipped(train | test)})
    return {"train": train_found, "test": test_found}


def imagenet2012(folder):
    """Classes of sorted synsets, though the kit's numbers run otherwise; a JPEG that is a PNG; an inner node in the kit."""
    from scipy.io import savemat

    synsets = ["n01440764", "n01443537", "n01484850"]
    numbers = (1, 10, 11, 12, 2, 3, 4, 5, 6, 7, 8, 9)
    _, train = drawing(grid("{}_{}.JPEG", synsets, numbers))
    tars = {f"{word}.tar": tarred({f"{word}_{number}.JPEG": encode(12 * label + index, "PNG" if number == 10 else "JPEG")
                                   for index, number in enumerate(numbers)}) for label, word in enumerate(synsets)}
    val, test = drawing([("ILSVRC2012_val_00000001.JPEG", 2), ("ILSVRC2012_val_00000002.JPEG", 0),
                         ("ILSVRC2012_val_00000003.JPEG", 0), ("ILSVRC2012_val_00000004.JPEG", 1)], first=50)
    fields = [("ILSVRC2012_ID", float), ("WNID", object), ("words", object), ("num_children", float)]
    meta = [(1, synsets[2], "shark", 0), (2, synsets[0], "tench", 0), (3, synsets[1], "goldfish", 0),
            (4, "n00001740", "entity", 3)]
    mat = io.BytesIO()
    savemat(mat, {"synsets": np.array(meta, fields).reshape(-1, 1)})
    kit = {"data/meta.mat": mat.getvalue(), "data/ILSVRC2012_validation_ground_truth.txt": "1\n2\n2\n3\n", "readme.txt": "kit"}
    write(folder, {"ILSVRC2012_img_train.tar": tarred(tars), "ILSVRC2012_img_val.tar": tarred(val),
                   "ILSVRC2012_devkit_t12.tar.gz": gzipped_tar({f"ILSVRC2012_devkit_t12/{name}": kit[name] for name in kit})})
    train = [train[pick] for pick in np.random.default_rng(0).permutation(36)]
    return {"train": train[:32], "dev": train[32:33], "dev_test": train[33:], "test": test}


def lfw(folder):
    """Bob has too few images. The last of the others are test, test, dev_test and dev, from the end."""
    people = {"Al_Gore": 5, "Bob_Few": 4, "Jos\u00e9_Many": 8, "Zoe_Six": 6}
    rows = [(f"lfw/{person}/{person}_{count + 1:04}.jpg", None) for person, size in people.items() for count in range(size)]
    members, _ = drawing(rows)
    write(folder, {"lfw.tgz": gzipped_tar(members)})
    splits = {name: [] for name in ("train", "dev", "dev_test", "test")}
    for label, (begin, end) in enumerate(((0, 5), (9, 17), (17, 23))):
        places = {"train": range(begin, end - 4), "dev": [end - 4], "dev_test": [end - 3], "test": [end - 2, end - 1]}
        for name, numbers in places.items():
            splits[name] += [(number, label) for number in numbers]
    return splits


def belgium_tsc(folder):
    train, train_found = drawing([(f"Training/{label:05}/{name}.ppm", label) for label, name in (
        (0, "01153_00000"), (0, "01153_00001"), (1, "00025_00000"), (17, "00102_00000"), (17, "00102_00001"),
        (40, "00001_00000"), (61, "00370_00000"))], "PPM")
    test, test_found = drawing([("Testing/00000/00017_00000.ppm", 0), ("Testing/00061/00204_00002.ppm", 61)], "PPM", first=7)
    stray = {"00000/GT-00000.csv": "Filename;Width\n", "Readme.txt": "Belgium"}
    for name, members in (("Training", train), ("Testing", test)):
        members |= {f"{name}/{path}": content for path, content in stray.items()}
        write(folder, {f"BelgiumTSC_{name}.zip": zipped(members)})
    return {"train": train_found, "test": test_found}


LAYOUTS = {
    "aberdeen": zipfile("Aberdeen.zip", ABERDEEN),
    "olivetti_face": zipfile("the-orl-database-for-training-and-testing.zip", OLIVETTI, mode="L"),
    "coil20": zipfile("coil-20-proc.zip", COIL20, "PNG", "L"),
    "coil100": coil100,
    "mpeg7": zipfile("MPEG7dataset.zip", MPEG7, "GIF", "1", stray={"original/": b"", "original/confusions-1.gif": b"\0",
                                                                   "original/shapedata.gif": b"\0"}),
    "butterflies": butterflies,
    "caltech101": caltech101,
    "umist": one_archive(gzipped_tar, "face.tar.gz", grid("{}/face{}.pgm", ("1a", "1b", "1c", "1d"), (1, 10, 2)), "PPM", "L"),
    "cmu_amp_expression": cmu_amp_expression,
    "pascal_voc2005": pascal_voc2005,
    "caltech_categories": caltech_categories,
    "uiuc_cars": one_archive(gzipped_tar, "uiuc.tar.gz", UIUC, "PNG", "L", UIUC_STRAY),
    "aloi": aloi,
    "scenes8": zipfile("spatial_envelope_256x256_static_8outdoorcategories.zip", SCENES8),
    "scenes15": zipfile("scene_categories.zip", SCENES15, mode="L"),
    "extended_yaleb": extended_yaleb,
    "ig02": ig02,
    "ppmi": ppmi,
    "caltech256": one_archive(tarred, "256_ObjectCategories.tar", CALTECH256, stray=CALTECH256_STRAY),
    "imagenet2012": imagenet2012,
    "lfw": lfw,
    "flickr_material_database": zipfile("FMD.zip", FMD, stray=FMD_STRAY),
    "belgium_tsc": belgium_tsc,
}
MODES = {"olivetti_face": "L", "coil20": "L", "mpeg7": "1", "umist": "L", "cmu_amp_expression": "1", "uiuc_cars": "L",
         "scenes15": "L", "extended_yaleb": "1"}
