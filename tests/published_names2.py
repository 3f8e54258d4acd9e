"""Small copies of data sets whose labels are told by the names of their files (2)."""

import io

import numpy as np
from PIL import Image
from published import encode, picture, tarred, write, zipped
from published_names1 import drawing, grid, gzipped_tar


def archives(*parts, kind="PNG", mode="RGB", stray: dict | None = None, copies: dict | None = None):
    """A layout of archives (pack, name, rows), all of one published split, in the order in which they are read.

    The last one holds `stray` members, too, and `copies` {name: (number, label)} of pictures that have been, behind all others;
    those without a label are dropped as they repeat one.
    """
    def layout(folder):
        found = []
        for pack, name, rows in parts:
            members, part = drawing(rows, kind, mode, first=len(found))
            found += part
            if name == parts[-1][1]:
                members |= stray or {}
                members |= {copy: encode(number, kind, mode=mode) for copy, (number, _) in (copies or {}).items()}
            write(folder, {name: pack(members)})
        return {"train": found + [row for row in (copies or {}).values() if row[1] is not None]}
    return layout


def compressed(content: bytes) -> bytes:
    """What the program compress makes of it (.Z), except for its size: codes of nine bits, one for each byte, and the table
    cleared (code 256) before it needs a tenth."""
    codes = []
    for start in range(0, len(content), 239):
        codes += [*content[start:start + 239], 256]
    bits = np.array(codes)[:, None] >> np.arange(9) & 1
    return b"\x1f\x9d\x90" + np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()


def vistex(folder):
    words = [f"{word}.{count:04}.ppm" for word, count in (("Bark", 0), ("Bark", 1), ("Brick", 0), ("Clouds", 0), ("Clouds", 1),
                                                          ("WheresWaldo", 0), ("Wood", 0), ("Wood", 2))]
    pictures = [(f"VisTex/FLAT/512x512/{word}", encode(number, "PPM")) for number, word in enumerate(words)]
    links = {f"VisTex/Images/Reference/{word.split('.')[0]}/{word}": f"../../../FLAT/512x512/{word}" for word in words}
    links |= {"VisTex/Images/Scenes/Valley/Valley.0000.ppm": "../../../FLAT/512x512/Bark.0000.ppm"}
    links |= {"VisTex/Images/Reference/Wood/Wood.0009.ppm": "../../../FLAT/512x512/Wood.0009.ppm"}  # leads nowhere
    small = {f"VisTex/FLAT/128x128/{word}": encode(100, "PPM") for word in words}
    trees = {letter: tarred(dict([pictures[number]])) for number, letter in enumerate("ABCDEFGH")}
    trees["A"] = tarred(dict([pictures[0]]) | {"VisTex/README": "Read me"}, links=links)
    trees["D"] = tarred(small | dict([pictures[3]]))
    members = {f"VisionTexture/vistex1.0a.{letter}.tar.Z": compressed(tree) for letter, tree in trees.items()}
    write(folder, {"VisTex.tar.gz": gzipped_tar({"VisionTexture/buildVisTex": "#!/bin/sh"} | members)})
    return {"train": list(enumerate((0, 0, 1, 3, 3, 17, 18, 18)))}


def animal(folder):
    number, found = 0, []
    for letter, words in (("A", ("bird", "cow")), ("B", ("fish", "rat"))):
        members = {}
        for label, word in enumerate(words, start=len(found) // 3):
            for count, mode in ((1, "1"), (18, "P"), (2, "L")):  # bits, a palette, grey
                file = io.BytesIO()
                Image.fromarray(picture(number, mode="1")).convert(mode).save(file, "TIFF")
                members[f"non_rigid_shape_{letter}/{word}/{word}{count}.tif"] = file.getvalue()
                found.append((number, label))
                number += 1
        write(folder, {f"non_rigid_shape_{letter}.zip": zipped(members | {f"non_rigid_shape_{letter}/cow/Thumbs.db": b"\0"})})
    return {"train": found}


def lfwa(folder):
    counts = {"Aaron_Peirsol": 5, "Abba_Eban": 4, "Jose_Maria_Aznar": 8, "Zico": 6}
    rows = [(f"lfw2/{person}/{person}_{count:04}.jpg", person) for person in counts for count in range(1, counts[person] + 1)]
    members, found = drawing(rows, "JPEG", "L")
    write(folder, {"lfwa.zip": zipped(members | {"lfw2/Zico/copy.jpg": b"\0", "lfw2/Zico/Aaron_Peirsol_0001.jpg": b"\0"})})
    splits = {"train": [], "dev": [], "dev_test": [], "test": []}
    for label, person in enumerate(("Aaron_Peirsol", "Jose_Maria_Aznar", "Zico")):
        numbers = [number for number, word in found if word == person]
        for name, begin, end in (("train", 0, -4), ("dev", -4, -3), ("dev_test", -3, -2), ("test", -2, None)):
            splits[name] += [(number, label) for number in numbers[begin:end]]
    return splits


def office_caltech_10(folder):
    office = [(f"{domain}/images/{name}.jpg", label) for domain in ("amazon", "dslr", "webcam") for name, label in (
        ("back_pack/frame_0001", 0), ("back_pack/frame_0002", 0), ("laptop_computer/frame_0001", 5), ("mug/frame_0001", 8))]
    caltech = [("003.backpack/003_0001", 0), ("003.backpack/003_0002", 0), ("027.calculator/027_0001", 2),
               ("041.coffee-mug/041_0001", 8), ("045.computer-keyboard/045_0001", 4), ("046.computer-monitor/046_0001", 6),
               ("047.computer-mouse/047_0001", 7), ("101.head-phones/101_0001", 3), ("127.laptop-101/127_0001", 5),
               ("224.touring-bike/224_0001", 1), ("238.video-projector/238_0001", 9)]
    members, train = drawing(office, "JPEG")
    write(folder, {"domain_adaptation_images.tar.gz": gzipped_tar(members | {"amazon/images/bookcase/frame_0001.jpg": b"\0"})})
    members, test = drawing([(f"256_ObjectCategories/{name}.jpg", label) for name, label in caltech], "JPEG", first=len(train))
    write(folder, {"256_ObjectCategories.tar": tarred(members | {"256_ObjectCategories/001.ak47/001_0001.jpg": b"\0",
                                                                 "256_ObjectCategories/003.backpack/RENAME2": "mv"})})
    splits = {"train": [], "dev": [], "dev_test": [], "test": []}
    for row, name in zip(train, ["train"] * 7 + ["dev"] * 2 + ["train"] * 3, strict=True):  # the reference's first draws
        splits[name].append(row)
    for number, row in enumerate(test):
        splits["test" if number in (4, 6, 9) else "dev_test"].append(row)
    return splits


def tiny_imagenet(folder):
    words = ("n01443537", "n01629819", "n12267677")
    rows = [(f"tiny-imagenet-200/train/{word}/images/{word}_{count}.JPEG", label)
            for label, word in enumerate(words) for count in (0, 10, 2)]
    members, train = drawing(rows, "JPEG")
    rows = [("val_10.JPEG", 2), ("val_0.JPEG", 0), ("val_9.JPEG", 1)]  # as listed
    pictures, test = drawing([(f"tiny-imagenet-200/val/images/{name}", label) for name, label in rows], "JPEG", first=9)
    listed = "".join(f"{name}\t{words[label]}\t0\t32\t44\t62\n" for name, label in [*rows, ("val_77.JPEG", 0)])
    stray = {"words.txt": "n01443537\tgoldfish", "train/n01443537/n01443537_boxes.txt": "n01443537_0.JPEG\t0\t10\t63\t58",
             "val/val_annotations.txt": listed, "test/images/test_0.JPEG": b"\0", "val/images/val_5.JPEG": b"\0"}
    members |= pictures | {f"tiny-imagenet-200/{name}": content for name, content in stray.items()}
    write(folder, {"tiny-imagenet-200.zip": zipped(members)})
    return {"train": train, "test": test}


def animal_web(folder):
    """Unpacked, into a folder of the archive's name, as nothing that reads RAR may be installed here."""
    rows = [("alpaca_0.jpg", 0), ("alpaca_1.jpg", 0), ("alpaca_10.jpg", 0), ("bengaltiger_0_1.jpg", 1),
            ("bengaltiger_1.jpg", 1), ("bengaltiger_10.JPG", 1),
            ("Écureuil_1.jpg", 2), ("Écureuil_10.jpg", 2), ("Écureuil_2.jpg", 2)]
    rows = [(f"animal_dataset_v1_clean_check/{name}", label) for name, label in rows]
    members, found = drawing(rows, "JPEG")
    members |= {name.rsplit(".", 1)[0] + ".pts": "version: 1\nn_points: 9" for name, _ in rows}
    members["animal_dataset_v1_clean_check/alpaca_7.jpg"] = encode(2, "JPEG")  # a copy
    write(folder, {f"animal_dataset_v1_c.rar/{name}": content for name, content in members.items()})
    return {"train": found}


def pneumonia_chest_xray(folder):
    rows = {split: [(f"chest_xray/chest_xray/{split}/{word}/IM-{count:04}.jpeg", label)
                    for label, word in enumerate(("NORMAL", "PNEUMONIA")) for count in counts]
            for split, counts in (("train", range(4)), ("val", (7,)), ("test", (8, 9)))}
    members, found = drawing(rows["train"] + rows["val"] + rows["test"], "JPEG", "L")
    members |= {name.replace("chest_xray/", "", 1): encode(60, "JPEG", mode="L") for name in members}  # again, but not the same
    members |= {"chest_xray/chest_xray/train/NORMAL/.DS_Store": b"\0",
                "chest_xray/__MACOSX/chest_xray/train/NORMAL/._IM.jpeg": b"\0"}
    write(folder, {"chest-xray-pneumonia.zip": zipped(members)})
    return {"train": found[:8], "dev_test": found[8:10], "test": found[10:]}


def german_tsr(folder):
    rows = [(f"GTSRB/Final_Training/Images/{label:05}/00000_{count:05}.ppm", label)
            for label in (0, 2, 10, 42) for count in (0, 29)]
    members, train = drawing(rows, "PPM")
    members |= {"GTSRB/Final_Training/Images/00000/GT-00000.csv": "Filename;Width", "GTSRB/Readme.txt": "Read me"}
    write(folder, {"GTSRB_Final_Training_Images.zip": zipped(members)})
    rows = [("00002.ppm", 41), ("00000.ppm", 16), ("00001.ppm", 1)]  # as listed
    members, test = drawing([(f"GTSRB/Final_Test/Images/{name}", label) for name, label in rows], "PPM", first=len(train))
    head = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2"
    members["GTSRB/Final_Test/Images/GT-final_test.test.csv"] = f"{head}\r\n00000.ppm;53;54;6;5;48;49\r\n"
    listed = "".join(f"{name};53;54;6;5;48;49;{label}\r\n" for name, label in rows)
    write(folder, {"GTSRB_Final_Test_Images.zip": zipped(members),
                   "GTSRB_Final_Test_GT.zip": zipped({"GT-final_test.csv": f"{head};ClassId\r\n{listed}"})})
    return {"train": train, "test": test}


def sun397(folder):
    words = ("a/abbey", "c/car_interior/backseat", "c/church/outdoor", "z/zoo")
    names = [(f"/{word}/sun_{letters}.jpg", label) for label, word in enumerate(words) for letters in ("ab", "cd", "ef", "gh")]
    train, test = [row for row in names if "sun_ef" not in row[0]], [row for row in names if "sun_ef" in row[0]]
    members, found = drawing([(f"SUN397{name}", label) for name, label in train + test], "PNG")  # whatever they are called
    broken = "/c/church/outdoor/sun_bhenjvsvrtumjuri.jpg"
    members |= {f"SUN397{broken}": b"\xff\xd8", "SUN397/ClassName.txt": "".join(f"/{word}\n" for word in words),
                "SUN397/a/abbey/sun_unlisted.jpg": b"\0"}
    write(folder, {"SUN397.tar.gz": gzipped_tar(members)})
    lists = {"Training_01.txt": [name for name, _ in train] + [broken], "Testing_01.txt": [name for name, _ in test],
             "Training_02.txt": [name for name, _ in test], "Testing_02.txt": [name for name, _ in train]}
    write(folder, {"Partitions.zip": zipped({name: "\r\n".join(lines) for name, lines in lists.items()})})
    return {"train": found[:len(train)], "test": found[len(train):]}


def kth_tips_2(version):
    return [(f"KTH-TIPS2-{version}/{word}/sample_{sample}/{number}{sample}-scale_{scale}_im_1_col.png", label)
            for word, number, label in (("aluminium_foil", 15, 0), ("cork", 16, 3), ("wool", 22, 10))
            for sample in "ad" for scale in (10, 2)]


UMD = [[("textures-1/1/a.png", 0), ("textures-1/1/b.png", 0), ("textures-1/10/a.png", 9), ("textures-1/2/a.png", 1),
        ("textures-1/9/a.png", 8)],
       [("textures-2/13/a.png", 12), ("textures-2/13/b.png", 12), ("textures-2/25/A.PNG", 24), ("textures-2/25/a.png", 24)]]
KTH_TIPS = [(f"KTH_TIPS/{word}/{number}-scale_{scale}_im_1_col.png", label)
            for word, number, label in (("aluminium_foil", 15, 0), ("linen", 44, 5), ("styrofoam", 20, 9))
            for scale in (10, 2, 3)]
UIUC = [(f"T{label:02}_{word}/T{label:02}_{count:02}.jpg", label - 1)
        for label, word in ((1, "bark1"), (2, "bark2"), (6, "wood3"), (25, "plaid")) for count in (1, 2, 40)]
SKETCH = grid("png/{}/{}.png", ("airplane", "alarm clock", "crane (machine)", "t-shirt"), (1, 10000, 80))
FONTS = [(f"English/Fnt/Sample{label + 1:03}/img{label + 1:03}-00001.png", label) for label in (0, 9, 10, 61)]
HANDS = [(f"English/Hnd/Img/Sample{label + 1:03}/img{label + 1:03}-001.png", label) for label in (0, 35)]
SIGNS = [(f"English/Img/{quality}/Bmp/Sample{label + 1:03}/img{label + 1:03}-00001.png", label)
         for quality in ("BadImag", "GoodImg") for label in (0, 36)]
NOT_MNIST = grid("notMNIST_small/notMNIST_small/{}/{}.png", "ABCDEFGHIJ", ("MDRiXzA4LnR0Zg==", "Q0FDV0xEIEJvbGQudHRm"))
NOT_MNIST_STRAY = {f"notMNIST_small/notMNIST_small/{name}.png": b"" for name in (
    "A/RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=", "F/Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==")}
NOT_MNIST_STRAY |= {"notMNIST_large/notMNIST_large/A/a.png": b"\0"}
CHESTS = grid("TB_Chest_Radiography_Database/{0}/{0}-{1}.png", ("Normal", "Tuberculosis"), (1, 10, 2, 700))
LUNGS = "COVID-19_Radiography_Dataset"
COVID = [(f"{LUNGS}/{word}/{inside}{word}-{count}.png", label)  # new and old versions, mixed
         for label, (word, inside) in enumerate((("COVID", ""), ("Lung_Opacity", "images/"), ("Normal", "images/"),
                                                 ("Viral Pneumonia", ""))) for count in (1, 10, 2)]
COVID_STRAY = {f"{LUNGS}/Normal/masks/Normal-1.png": b"\0", f"{LUNGS}/COVID.metadata.xlsx": b"PK"}

LAYOUTS = {
    "vistex": vistex,
    "umd": archives((zipped, "textures-1.zip", UMD[0]), (zipped, "textures-2.zip", UMD[1]), mode="L",
                    stray={"textures-2/13/Thumbs.db": b"\0"}),
    "kth_tips": archives((tarred, "kth_tips_col_200x200.tar", KTH_TIPS), stray={"KTH_TIPS/README.txt": "Read me"}),
    "uiuc_texture": archives((zipped, "T01-T05.zip", UIUC[:6]), (zipped, "T06-T10.zip", UIUC[6:9]),
                             (zipped, "T21-T25.zip", UIUC[9:]), kind="JPEG", mode="L"),
    "kth_tips_2b": archives((tarred, "kth-tips2-b_col_200x200.tar", kth_tips_2("b"))),
    "kth_tips_2a": archives((tarred, "kth-tips2-a_col_200x200.tar", kth_tips_2("a"))),
    "sketch": archives((zipped, "sketches_png.zip", SKETCH), mode="L", stray={"png/filelist.txt": "airplane/1.png"}),
    "animal": animal,
    "chars74k": archives((gzipped_tar, "EnglishFnt.tgz", FONTS), (gzipped_tar, "EnglishHnd.tgz", HANDS),
                         (gzipped_tar, "EnglishImg.tgz", SIGNS),
                         stray={"English/Img/GoodImg/Msk/Sample001/img001-00001.png": b"\0", "English/Hnd/Trj/a.m": ""},
                         copies={"English/Img/GoodImg/Bmp/Sample062/img062-00001.png": (3, None),
                                 "English/Img/GoodImg/Bmp/Sample062/img062-00002.png": (0, 61)}),
    "lfwa": lfwa,
    "office_caltech_10": office_caltech_10,
    "not_mnist": archives((zipped, "notmnist.zip", NOT_MNIST), mode="L", stray=NOT_MNIST_STRAY,
                          copies={"notMNIST_small/notMNIST_small/J/zz.png": (18, None),
                                  "notMNIST_small/notMNIST_small/J/zzz.png": (0, 9)}),
    "tiny_imagenet": tiny_imagenet,
    "animal_web": animal_web,
    "pneumonia_chest_xray": pneumonia_chest_xray,
    "tubercolosis": archives((zipped, "tuberculosis-tb-chest-xray-dataset.zip", CHESTS),
                             stray={"TB_Chest_Radiography_Database/Normal.metadata.xlsx": b"PK"}),
    "covid_19_xray": archives((zipped, "covid19-radiography-database.zip", COVID), mode="L", stray=COVID_STRAY,
                              copies={f"{LUNGS}/Viral Pneumonia/Viral Pneumonia-3.png": (11, None),
                                      f"{LUNGS}/Viral Pneumonia/Viral Pneumonia-4.png": (1, 3)}),
    "synthetic_covid19_xray": archives((zipped, "G_NC.zip", [(f"G1/{count}.png", 0) for count in (0, 1, 10, 2)]),
                                       (zipped, "G_PC.zip", [(f"G2/{count}.png", 1) for count in (0, 1, 10, 2)])),
    "german_tsr": german_tsr,
    "sun397": sun397,
}
MODES = {"animal": "1"} | dict.fromkeys(
    ("umd", "uiuc_texture", "sketch", "lfwa", "not_mnist", "pneumonia_chest_xray", "covid_19_xray"), "L")
