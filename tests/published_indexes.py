"""Small copies of data sets whose labels lie in MATLAB, PASCAL VOC or JSON indexes."""

import functools
import io
import json

import numpy as np
from published import encode, encoded, picture, tarred, write, zipped
from scipy.io import savemat


@functools.cache
def jpeg(number: int) -> bytes:
    return encode(number, "JPEG")


def jpegs(names: dict) -> dict:
    """{file name: picture number} as files."""
    return {name: jpeg(number) for name, number in names.items()}


def scene(boxes: dict, size=(96, 64), background=7) -> bytes:
    """A JPEG with other pictures in boxes (left, top, right, bottom)."""
    pixels = picture(background, size)
    for (left, top, right, bottom), number in boxes.items():
        pixels[top:bottom, left:right] = picture(number, (1, 1))
    return encoded(pixels, "JPEG")


def mat(**variables) -> bytes:
    file = io.BytesIO()
    savemat(file, variables)
    return file.getvalue()


def cell(words: list) -> np.ndarray:
    """A column of a MATLAB cell array."""
    return np.array([[word] for word in words], object)


def permuted(pool: list, seed: int, **ends: int) -> dict:
    """Runs of a permutation, by where each one ends."""
    order, begin, parts = np.random.default_rng(seed).permutation(len(pool)), 0, {}
    for name, end in ends.items():
        parts[name] = [pool[place] for place in order[begin:end]]
        begin = end
    return parts


# ---------------------------------------------------------------------------------------------------------------------
# PASCAL VOC


def pascal_voc2006(folder) -> dict:
    def archive(part: str, positive: dict, ids: range) -> bytes:
        base = "VOCdevkit/VOC2006/"
        members = {f"{base}PNGImages/{number:06d}.png": encode(number) for number in reversed(ids)}
        for word in ("bicycle", "bus", "car", "cat", "cow", "dog", "horse", "motorbike", "person", "sheep"):
            flags = {number: " 0" if number == 9 else "-1" for number in ids} | dict.fromkeys(positive.get(word, ()), " 1")
            lines = [f"{number:06d} {flag}" for number, flag in flags.items()]
            members[f"{base}ImageSets/{word}_{part}.txt"] = "\n".join(lines) + "\n"
        members[f"{base}ImageSets/sheep_train.txt"] = f"{ids[0]:06d}  1\n"
        members[f"{base}ImageSets/{part}.txt"] = "".join(f"{number:06d}\n" for number in ids)
        members[f"{base}Annotations/{ids[0]:06d}.txt"] = "# PASCAL Annotation Version 1.00"
        return tarred(members)

    train = archive("trainval", {"bicycle": [1, 2], "cat": [3, 4, 5], "person": [2, 4, 6, 7], "sheep": [8, 77]}, range(1, 11))
    test = archive("test", {"bus": [11, 12], "cow": [12]}, range(11, 14))
    write(folder, {"voc2006_trainval.tar": train, "voc2006_test.tar": test})
    return {"train": [(1, 0), (2, 8), (3, 3), (4, 8), (5, 3), (6, 8), (7, 8), (8, 9)], "test": [(11, 1), (12, 4)]}


def thing(word: str, difficult=0, box=(1, 1, 9, 9), actions=()) -> str:
    """An object in PASCAL's XML."""
    sides = dict(zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
    box = "".join(f"<{side}>{sides[side]}</{side}>" for side in ("xmax", "xmin", "ymax", "ymin"))
    marks = "".join(f"<{action}>{int(action in actions)}</{action}>" for action in ACTIONS)
    return (f"<object><name>{word}</name>{f'<actions>{marks}</actions>' if actions else ''}<bndbox>{box}</bndbox>"
            f"<difficult>{difficult}</difficult><part><name>head</name></part></object>")


def devkit(year: int, sets: dict, images: dict) -> bytes:
    """A tar of index files {name: lines} and images {id: (picture number or file, its objects)}."""
    base = f"VOCdevkit/VOC{year}"
    members = {f"{base}/ImageSets/{name}.txt": "".join(f"{line}\n" for line in lines) for name, lines in sets.items()}
    for word, (content, things) in images.items():
        members[f"{base}/JPEGImages/{word}.jpg"] = jpeg(content) if isinstance(content, int) else content
        members[f"{base}/Annotations/{word}.xml"] = ("<annotation>\n\t<source><name>flickr</name></source>"
                                                     f"{''.join(things)}\n</annotation>\n")
    return tarred(members | {f"{base}/SegmentationClass/000005.png": encode(0)})


def voc2007(folder) -> dict:
    dog, chair, both = [thing("dog")], [thing("chair", 1), thing("chair")], [thing("tvmonitor"), thing("aeroplane", 1)]
    train = {f"{number:06d}": (number, (dog, chair, both)[number % 3]) for number in range(12, 22)}
    held = {f"{number:06d}": (number, dog) for number in (5, 33)}
    test = {f"{number:06d}": (number, chair) for number in (1, 2, 3)}
    trainval = {"Main/train": [*reversed(train), "000099"], "Main/val": held, "Main/trainval": train,
                "Main/dog_train": ["000005 -1"], "Layout/train": held}
    write(folder, {"VOCtrainval_06-Nov-2007.tar": devkit(2007, trainval, train | held),
                   "VOCtest_06-Nov-2007.tar": devkit(2007, {"Main/test": test, "Main/dog_test": ["000005 -1"]}, test)})
    pool = [(number, ((11,), (8,), (0, 19))[number % 3]) for number in range(12, 22)]
    return permuted(pool, 0, train=8, dev=10) | {"dev_test": [(5, (11,)), (33, (11,))],
                                                 "test": [(1, (8,)), (2, (8,)), (3, (8,))]}


def voc2012(folder) -> dict:
    train = {f"2008_{number:06d}": (number, [thing("person"), thing("bus", 1)]) for number in range(6)}
    val = {f"2009_{number:06d}": (number, [thing("sheep")]) for number in range(20, 27)}
    sets = {"Main/train": train, "Main/val": val, "Main/cat_val": train}
    write(folder, {"VOCtrainval_11-May-2012.tar": devkit(2012, sets, train | val)})
    order = np.random.default_rng(0).permutation(7)  # the first three of seven are dev_test
    halves = {"dev_test": sorted(order[:3]), "test": sorted(order[3:])}
    return (permuted([(number, (5, 14)) for number in range(6)], 0, train=4, dev=6)
            | {name: [(20 + place, (16,)) for place in places] for name, places in halves.items()})


ACTIONS = ("jumping", "other", "phoning", "playinginstrument", "reading", "ridingbike", "ridinghorse", "running", "takingphoto",
           "usingcomputer", "walking")


def voc_actions(folder) -> dict:
    boxes = [(0, 0, 32, 32), (32, 16, 64, 48), (64, 32, 96, 64)]
    images, rows = {}, []
    for number in range(5):
        pictures = [10 + 3 * number + place for place in range(3)]
        things = [thing("person", 0, boxes[0], ["walking", "phoning"]), thing("person", 0, boxes[1]),  # not annotated
                  thing("person", 1, [f"{value}.7" for value in boxes[2]], ["jumping"])]
        images[f"2010_{number:06d}"] = scene(dict(zip(boxes, pictures, strict=True))), things
        rows += [(pictures[0], (1, 9)), (pictures[2], (0,))]
    images["2011_000001"] = scene({}), [thing("person", 0, (1, 1, 40, 40), ["reading"])]  # listed for training nowhere
    ids = list(images)[:5]
    sets = {"Action/jumping_trainval": [f"{word}  1  1" for word in ids[::-1][:3]], "Main/trainval": images,
            "Action/running_trainval": [f"{word} 1 -1" for word in ids[:3]], "Action/running_test": ["2011_000001 1 -1"],
            "Action/trainval": [f"{word} 1" for word in images]}
    write(folder, {"VOCtrainval_11-May-2012.tar": devkit(2012, sets, images)})
    return {"train": rows}


# ---------------------------------------------------------------------------------------------------------------------
# MATLAB


def oxford_flowers_17(folder) -> dict:
    ids = {"trn1": [1, 1360, 81, 80, 82, 400, 401, 402, 403, 2, 3, 1200], "val1": [161, 160], "tst1": [1281, 5]}
    numbers = {number: place for place, number in enumerate(sorted(sum(ids.values(), [])))}
    other = {"trn2": [[161]], "val2": [[1]], "tst2": [[81]]}
    write(folder, {
        "17flowers.tgz": tarred(jpegs({f"jpg/image_{number:04d}.jpg": place for number, place in numbers.items()})
                                | {"jpg/files.txt": "image_0001.jpg\n", "jpg/files.txt~": ""}, "gz"),
        "datasplits.mat": mat(**{name: np.array([values], np.uint16) for name, values in ids.items()}, **other),
    })
    labels = {1: 0, 2: 0, 3: 0, 5: 0, 80: 0, 81: 1, 82: 1, 160: 1, 161: 2, 400: 4, 401: 5, 402: 5, 403: 5, 1200: 14, 1281: 16,
              1360: 16}
    names = {"train": "trn1", "dev_test": "val1", "test": "tst1"}
    return {split: [(numbers[number], labels[number]) for number in sorted(ids[name])] for split, name in names.items()}


def oxford_flowers102(folder) -> dict:
    labels = [77, 1, 102, 5, 5, 9, 1, 2, 3, 3, 4, 4, 102, 8, 6]
    write(folder, {
        "102flowers.tgz": tarred(jpegs({f"jpg/image_{number:05d}.jpg": number for number in range(1, 16)}), "gz"),
        "imagelabels.mat": mat(labels=np.array([labels], np.uint8)),
        "setid.mat": mat(trnid=np.array([[9, 2, 4, 6, 8, 1]], np.uint16), valid=np.array([[3, 7, 5]], np.uint16),
                         tstid=np.array([[15, 14, 13, 12, 11, 10]], np.uint16)),
    })
    return permuted([(1, 76), (2, 0), (4, 4), (6, 8), (8, 1), (9, 2)], 0, train=4, dev=6) | {
        "dev_test": [(3, 101), (5, 4), (7, 0)], "test": [(10, 2), (11, 3), (12, 3), (13, 101), (14, 7), (15, 5)]}


def structure(fields: dict) -> np.ndarray:
    """A MATLAB structure array (1, N) from {field: list}."""
    count = len(next(iter(fields.values())))
    array = np.empty((1, count), [(name, object) for name in fields])
    for name, values in fields.items():
        for place, value in enumerate(values):
            array[0, place][name] = value
    return array


def stanford_cars(folder) -> dict:
    classes, tests = [14, 3, 196, 1, 1, 2, 3, 5, 14, 1], [0, 0, 1, 0, 0, 0, 0, 0, 1, 0]
    annotations = structure({"relative_im_path": [f"car_ims/{number:06d}.jpg" for number in range(1, 11)], "bbox_x1": [5] * 10,
                             "class": classes, "test": tests})
    write(folder, {"car_ims.tgz": tarred(jpegs({f"car_ims/{number:06d}.jpg": number for number in range(1, 11)}), "gz"),
                   "cars_annos.mat": mat(annotations=annotations, class_names=cell(["AM General Hummer", "Acura RL"]).T)})
    return {"train": [(1, 13), (2, 2), (4, 0), (5, 0), (6, 1), (7, 2), (8, 4), (10, 0)], "test": [(3, 195), (9, 13)]}


def stanford_dogs(folder) -> dict:
    breeds = {1: "n02085620-Chihuahua", 2: "n02085782-Japanese_spaniel", 120: "n02116738-African_hunting_dog"}

    def path(number: int, label: int) -> str:
        return f"{breeds[label]}/{breeds[label][:9]}_{number}.jpg"

    def listed(pairs: list) -> bytes:
        return mat(file_list=cell([path(*pair) for pair in pairs]), annotation_list=cell([path(*pair)[:-4] for pair in pairs]),
                   labels=np.array([[label] for _, label in pairs], np.uint8))

    train, test = [(17, 120), (18, 120), (11, 1), (12, 1), (13, 1), (14, 2), (15, 2), (16, 2)], [(21, 1), (23, 120), (22, 2)]
    images = jpegs({f"Images/{path(*pair)}": pair[0] for pair in train + test})
    transparent = np.dstack([picture(12), np.full((9, 12), 255, np.uint8)])
    images[f"Images/{path(12, 1)}"] = encoded(transparent)  # one is a PNG in fact
    lists = {"file_list": train + test, "test_list": test, "train_list": train}
    write(folder, {"images.tar": tarred(images),
                   "lists.tar": tarred({f"{name}.mat": listed(pairs) for name, pairs in lists.items()})})
    pool = [(11, 0), (12, 0), (13, 0), (14, 1), (15, 1), (16, 1), (17, 119), (18, 119)]
    return permuted(pool, 0, train=5, dev=6, dev_test=8) | {"test": [(21, 0), (22, 1), (23, 119)]}


def sun_attributes(folder) -> dict:
    paths = [f"{word}/sun_{word[0]}{place}.jpg" for word in ("b/bakery/shop", "a/abbey") for place in range(6)]
    votes = np.zeros((12, 102))
    votes[:, 101] = 1 / 3
    votes[:6, [0, 40]] = 1, 2 / 3
    base = "SUNAttributeDB/"
    write(folder, {
        "SUNAttributeDB_Images.tar.gz": tarred(jpegs({f"images/{path}": place for place, path in enumerate(paths)})
                                               | {"images/a/abbey/sun_unlabelled.jpg": jpeg(99)}, "gz"),
        "SUNAttributeDB.tar.gz": tarred({f"{base}images.mat": mat(images=cell(paths)), f"{base}._images.mat": "resource fork",
                                         f"{base}attributeLabels_continuous.mat": mat(labels_cv=votes),
                                         f"{base}attributes.mat": mat(attributes=cell(["sailing/ boating"] * 102))}, "gz"),
    })
    return {"train": [(place, (101,)) for place in range(6, 12)] + [(place, (0, 40, 101)) for place in range(6)]}


def bin_of(place: int) -> int:
    """The class where 20 consecutive counts are equally frequent: 1, 2, 2, ..., 2 and 3 counts a class, because a class ends
    before it holds its tenth."""
    return min(9, (place % 20 + 1) // 2)


def mall(folder) -> dict:
    numbers = range(1, 841)
    counts = np.array([[13 + number % 20] for number in numbers], np.uint8)
    frame = structure({"loc": [np.zeros((2, 2))] * 3})
    names = {f"mall_dataset/frames/seq_{number:06d}.jpg": number % 216 for number in numbers}
    write(folder, {"mall_dataset.zip": zipped(jpegs(names) | {"mall_dataset/mall_gt.mat": mat(count=counts, frame=frame),
                                                              "mall_dataset/perspective_roi.mat": mat(pMapN=np.zeros((2, 2))),
                                                              "mall_dataset/readme.txt": "", "mall_dataset/Thumbs.db": ""})})
    rows = [(number % 216, bin_of(number)) for number in numbers]
    return permuted(rows[:800], 1, train=560, dev=680, dev_test=800) | {"test": rows[800:]}


def shanghai_tech(folder) -> dict:
    sizes = {("A", "train"): 300, ("B", "train"): 400, ("A", "test"): 8, ("B", "test"): 12}
    names = [(f"ShanghaiTech/part_{part}/{split}_data/", number)
             for (part, split), count in sizes.items() for number in range(1, count + 1)]
    members = {"ShanghaiTech/shanghaitech_h5_empty/part_A/train_data/ground-truth/GT_IMG_1.mat": mat(image_info=0)}
    rows = {}
    for place, (base, number) in enumerate(names):
        info = np.empty((1, 1), object)
        info[0, 0] = {"location": np.ones((3 + place % 20, 2)), "number": 3 + place % 20}
        members[f"{base}ground-truth/GT_IMG_{number}.mat"] = mat(image_info=info)
        members[f"{base}images/IMG_{number}.jpg"] = jpeg(place % 216)
        rows[f"{base}IMG_{number}.mat"] = place % 216, bin_of(place)
    write(folder, {"shanghaitech.zip": zipped(members)})
    train, test = ([rows[name] for name in sorted(rows) if part in name] for part in ("/train_data/", "/test_data/"))
    return permuted(train, 1, train=489, dev=595, dev_test=700) | {"test": test}


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def coco_single_label(folder) -> dict:
    def archive(name: str, images: dict) -> bytes:
        return zipped({f"{name}/{number:012d}.jpg": content for number, content in images.items()})

    def instances(images: list, annotations: list) -> str:
        keys = ("image_id", "category_id", "bbox", "iscrowd")
        return json.dumps({
            "info": {"year": 2017}, "categories": [{"id": 90, "name": "toothbrush"}],
            "images": [{"license": 1, "file_name": f"{number:012d}.jpg", "height": 64, "id": number} for number in images],
            "annotations": [{"segmentation": [[0.0, 1.0]], "area": 9.5, "id": place, **dict(zip(keys, row, strict=True))}
                            for place, row in enumerate(annotations)]})

    train = {581: scene({(0, 0, 32, 32): 11, (32, 16, 64, 48): 12, (64, 32, 96, 64): 13}),
             9: scene({(16, 16, 48, 48): 14}, background=15),
             30: encoded(np.full((64, 96), 60, np.uint8), "JPEG")}  # the grey of picture 43
    rows = [(581, 90, [64.2, 31.8, 50, 60.5], 0), (9, 1, [16, 16, 32, 32], 1), (581, 3, [0, 0, 31.6, 32.4], 0),
            (9, 2, [16, 16, 15.99, 32], 0), (9, 2, [16, 16, 32, 15.99], 0), (581, 18, [48.3, 16, 16, 32], 0),
            (30, 5, [3, 4, 50, 16], 0), (77, 5, [3, 4, 50, 16], 0), (9, 44, [60, 0, 30, 40], 0),
            (581, 44, [32, 16, 32, 32], 0), (9, 44, [16, 16, 32, 32], 0)]
    write(folder, {
        "train2017.zip": archive("train2017", train),
        "val2017.zip": archive("val2017", {139: scene({}, background=20)}),
        "annotations_trainval2017.zip": zipped({
            "annotations/instances_train2017.json": instances([581, 77, 9, 30], rows),
            "annotations/instances_val2017.json": instances([139], [(139, 64, [0, 0, 96, 64], 0)]),
            "annotations/captions_train2017.json": "{}", "annotations/person_keypoints_train2017.json": "{}"}),
    })
    return {"train": [(13, 89), (14, 0), (11, 2), (12, 17), (43, 4), (15, 43), (12, 43), (14, 43)], "test": [(20, 63)]}


def caltech_camera_traps(folder) -> dict:
    def word(number: int) -> str:
        return f"5998{number:04d}-23d2"

    def annotations(rows: list) -> str:
        """Rows of (picture number, categories)."""
        return json.dumps({
            "images": [{"id": word(number), "file_name": f"{word(number)}.jpg", "location": 38} for number, _ in rows],
            "annotations": [{"id": "a", "image_id": word(number), "category_id": category, "bbox": [1, 1, 2, 2]}
                            for number, categories in rows for category in categories],
            "categories": [{"id": 6, "name": "bobcat"}, {"id": 30, "name": "empty"}, {"id": 33, "name": "car"},
                           {"id": 99, "name": "fox"}]})

    sets = {"CaltechCameraTrapsECCV18": [(1, [99])], "cis_test_annotations": [(25, [6])], "cis_val_annotations": [(26, [6])],
            "train_annotations": [*((number, [6, 30]) for number in range(10, 0, -1)), (555, [6]), (27, [])],
            "trans_test_annotations": [(20, [99]), (21, [33])], "trans_val_annotations": [(22, [6])]}
    images = {f"eccv_18_all_images_sm/{word(number)}.jpg": number for number in range(30)}
    files = {f"eccv_18_annotation_files/{name}.json": annotations(rows) for name, rows in sets.items()}
    write(folder, {"eccv_18_all_images_sm.tar.gz": tarred(jpegs(images), "gz"),
                   "eccv_18_annotations.tar.gz": tarred(files, "gz")})
    return {"train": [(number, 2) for number in range(1, 11)], "dev_test": [(22, 0)], "test": [(20, 15), (21, 14)]}


LAYOUTS = {layout.__name__: layout for layout in (
    pascal_voc2006, voc2007, voc2012, voc_actions, oxford_flowers_17, oxford_flowers102, stanford_cars, stanford_dogs,
    sun_attributes, mall, shanghai_tech, coco_single_label, caltech_camera_traps)}
