"""Small copies of the data sets of datasets_bespoke.yaml."""

import io

import numpy as np
from published import encode, encoded, picture, tarred, write, zipped
from scipy.io import savemat

NOISE = "not a picture"


def magellan_venus_volcanoes(folder):
    # in sorted order; the lists' rows are: confidence, x, y, radius
    lists = {"1": "4 10 20 3.5\n1 455.2 602.8 12.5\n", "10": "2 11 12 13\n", "100": "", "101": "3 1 1 1\n4 1 1 1\n",
             "11": "1 1 1 1\r\n", "134": "4 100 1 1\n", "2": "2 1 1 1\n1 1 1 1\n1 2 2 2\n", "20": "1 3 4 5\n", "3": "3 1 1 1\n",
             "9": "1 7 7 7"}
    members = {"package/README": NOISE, "package/Chips_Exp1/img5.sdt": b"\0" * 10, "package/FOA/img1.lxyr": "1 1 1 1\n"}
    for number, (image, text) in enumerate(lists.items()):
        members[f"package/Images/img{image}.sdt"] = picture(number, (1024, 1024), "L").tobytes()
        members[f"package/Images/img{image}.spr"] = "2\n1024 0 1024\n"
        members[f"package/GroundTruths/img{image}.lxyr"] = text
    write(folder, {"volcanoes.tar.gz": tarred(members, "gz")})
    return {"train": list(enumerate([1, 0, 0, 0, 1, 0, 1, 1, 0, 1]))}


def brodatz(folder):
    # file, side, class; patches count on from picture to picture, column by column
    pictures = [("D1.gif", 640, 0), ("D2.gif", 30, 1), ("D10.GIF", 31, 9), ("D13.gif", 32, 12), ("D15.gif", 33, 13),
                ("D112.gif", 64, 110)]
    write(folder, {"D1.txt": NOISE, "brodatz.html": NOISE})
    random, splits = np.random.default_rng(0), {"train": [], "dev": [], "dev_test": [], "test": []}
    for index, (name, side, label) in enumerate(pictures):
        pixels, patch = np.zeros((side, side), np.uint8), side // 3
        for number in range(9):
            left, top = number // 3 * patch, number % 3 * patch
            pixels[top:top + patch, left:left + patch] = picture(9 * index + number, (patch, patch), "L")
        write(folder, {name: encoded(pixels, "GIF")})
        rows = [(9 * index + int(number), label) for number in random.permutation(9)]
        for split, part in zip(splits, (rows[:5], rows[5:6], rows[6:7], rows[7:]), strict=True):
            splits[split] += part
    return splits


def iaprtc12(folder):
    # image id -> labels of its regions, from 1; in sorted order of folder and id
    regions = {"00/1": [1, 17, 276], "00/10": [17, 17], "00/12": [5], "00/2": [276, 1], "01/30": [40, 5], "01/31": [2, 3, 4, 2],
               "40/400": [100], "40/401": [7, 1], "40/402": [9], "40/403": [9, 8]}
    inside, members = "saiaprtc12ok/benchmark/saiapr_tc-12", {}
    lists = {"training": [1, 10, 12, 2, 30, 401, 402, 403, 999], "validation": [31], "testing": [400]}
    for number, image in enumerate(regions):
        place, name = image.split("/")
        members[f"iapr/{place}/images/{name}.jpg"] = encode(number, "JPEG")
        members[f"iapr/{place}/segmented_images/{name}.jpg"] = encode(200, "JPEG")
        members[f"{inside}/{place}/images/{name}.jpg"] = encode(201, "JPEG")
    for place in ("00", "01", "40"):
        members[f"{inside}/{place}/labels.txt"] = "".join(
            f"{image.split('/')[1]}\t{region} {label}\r\n" for image, labels in regions.items() if image.startswith(place)
            for region, label in enumerate(labels, 1))
    members["saiaprtc12ok/benchmark/wlist.txt"] = "".join(f"{word}\t{'' if word == 170 else 'w'}\n" for word in range(1, 277))
    for name, ids in lists.items():
        file = io.BytesIO()
        savemat(file, {name: np.array(ids, np.uint16)[:, None]})
        members[f"saiaprtc12ok/matlab/matlab/{name}.mat"] = file.getvalue()
    write(folder, {"iapr-tc12.zip": zipped(members)})
    return {"train": [(0, (0, 16, 275)), (1, (16,)), (2, (4,)), (3, (0, 275)), (4, (4, 39)), (5, (1, 2, 3)), (7, (0, 6)),
                      (8, (8,)), (9, (7, 8))]}


def tid(year, types, levels, metrics):
    """Value n of the list has rank 7n modulo their number; the lowest two of a fifth equal the highest of the one below."""
    def layout(folder):
        images = ["I01_01_2", f"I25_{types:02}_{levels}", "i01_01_1", "i01_02_1", "i02_01_1", "i03_05_4", "i16_01_1",
                  "i24_17_1", "i25_01_1", "i25_16_4"]
        total = 25 * types * levels
        ranks = [7 * line % total for line in range(total)]
        values = [rank - rank % (total // 5) - 1 if rank % (total // 5) < 2 else rank for rank in ranks]
        archive = f"tid{year}.rar"  # a folder of that name reads like the archive, for which there is no writer
        write(folder, {f"{archive}/metrics_values/{metrics}": "".join(f"{value / total:.6f}\r\n" for value in values),
                       f"{archive}/metrics_values/PSNR.TXT": "1\n", f"{archive}/mos.txt": "5.5\n", f"{archive}/readme": NOISE,
                       f"{archive}/reference_images/I01.BMP": encode(200, "BMP")})
        rows = []
        for number, image in enumerate(images):
            reference, kind, level = (int(part) for part in image[1:].split("_"))
            line = (reference - 1) * types * levels + (kind - 1) * levels + level - 1
            bin_of_rank, place = divmod(ranks[line], total // 5)
            rows.append((number, max(0, bin_of_rank - (place < 2))))
            write(folder, {f"{archive}/distorted_images/{image}.{'BMP' if number == 3 else 'bmp'}": encode(number, "BMP")})
        return {"train": rows}

    return layout


def trancos(folder):
    # 20 images with 1 to 20 vehicles, so that the tenths of the distribution end after 1, 3, 5, ... vehicles
    counts = [(7 * number) % 20 + 1 for number in range(20)]
    splits = {"training": range(0, 10), "validation": range(10, 14), "test": range(14, 20)}
    members = {"TRANCOS_v3/README.txt": NOISE, "TRANCOS_v3/image_sets/trainval.txt": "image-1-000000.jpg\n"}
    for number, count in enumerate(counts):
        stem = f"TRANCOS_v3/images/image-{1 + number // 10}-{number:06}"
        members |= {f"{stem}.jpg": encode(number, "JPEG"), f"{stem}dots.png": encode(200), f"{stem}mask.mat": NOISE,
                    f"{stem}.txt": "\n".join(f"{x}\t{x + 1}" for x in range(count)) + "\n"}
    for name, numbers in splits.items():  # in no order
        members[f"TRANCOS_v3/image_sets/{name}.txt"] = "".join(f"image-{1 + n // 10}-{n:06}.jpg\n" for n in reversed(numbers))
    write(folder, {"TRANCOS_v3.tar.gz": tarred(members, "gz")})
    rows = [(number, min(count // 2, 9)) for number, count in enumerate(counts)]
    return {"train": rows[:10], "dev_test": rows[10:14], "test": rows[14:]}


def awa2(folder):
    classes = ["antelope", "grizzly+bear", "killer+whale", "bat", "dolphin"]  # class c has the attributes c, c + 10 and 84
    matrix = np.zeros((5, 85), int)
    for index in range(5):
        matrix[index, [index, index + 10, 84]] = 1
    lists = {"train": ["grizzly+bear", "antelope", "dolphin"], "test": ["bat"]}
    images = [("antelope", "antelope_10001.jpg"), ("antelope", "antelope_10002.jpg"), ("bat", "bat_10001.jpg"),
              ("bat", "bat_10002.JPG"), ("dolphin", "dolphin_10001.jpg"), ("grizzly+bear", "grizzly+bear_10001.jpg"),
              ("grizzly+bear", "grizzly+bear_10010.jpg"), ("grizzly+bear", "grizzly+bear_10100.jpg"),
              ("killer+whale", "killer+whale_10001.jpg")]
    inside = {f"JPEGImages/{label}/{name}": encode(number, "JPEG") for number, (label, name) in enumerate(images)}
    inside |= {"classes.txt": "".join(f"{index:>6}\t{name}\n" for index, name in enumerate(classes, 1)),
               "predicates.txt": "".join(f"{index:>6}\tattribute\n" for index in range(1, 86)),
               "predicate-matrix-binary.txt": "".join(" ".join(map(str, row)) + "\n" for row in matrix),
               "predicate-matrix-continuous.txt": "1.0 2.0\n", "README-images.txt": NOISE,
               **{f"{split}classes.txt": "\n".join(names) + "\n" for split, names in lists.items()}}
    write(folder, {"AwA2-data.zip": zipped({f"Animals_with_Attributes2/{name}": file for name, file in inside.items()})})
    train = [(number, (label, label + 10, 84)) for number, label in [(0, 0), (1, 0), (4, 4), (5, 1), (6, 1), (7, 1)]]
    return {"train": train, "test": [(2, (3, 13, 84)), (3, (3, 13, 84))]}


def turned(yaw, pitch, roll):
    """Rotation by yaw about z, then pitch about y, then roll about x, in degrees."""
    cos, sin = np.cos(np.radians([yaw, pitch, roll])), np.sin(np.radians([yaw, pitch, roll]))
    about_z = np.array([[cos[0], -sin[0], 0], [sin[0], cos[0], 0], [0, 0, 1]])
    about_y = np.array([[cos[1], 0, sin[1]], [0, 1, 0], [-sin[1], 0, cos[1]]])
    about_x = np.array([[1, 0, 0], [0, cos[2], -sin[2]], [0, sin[2], cos[2]]])
    return about_x @ about_y @ about_z


def biwi(folder):
    # 20 poses, so that the fifths of each angle begin at ranks 0, 4, 8, 12 and 16
    sequences = ["01", "02", "03", "04", "05", "05", "06", "07", "08", "09", "10", "11", "12", "13", "14", "15", "16", "20",
                 "23", "24"]
    where = {"01": "test", "04": "test", "08": "test", "10": "test", "03": "dev_test", "09": "dev_test", "02": "dev",
             "07": "dev"}
    members = {"db_annotations/01/frame_00003_pose.txt": NOISE, "head_pose_masks/01/frame_00003_mask.png": encode(200),
               "faces_0/01/frame_00099_rgb.png": encode(201), "faces_0/01/rgb.cal": NOISE}  # frame 99 has no pose
    splits = {"train": [], "dev": [], "dev_test": [], "test": []}
    for number, sequence in enumerate(sequences):
        ranks = [number * step % 20 for step in (7, 3, 9)]
        stem = f"faces_0/{sequence}/frame_{number + 3:05}"
        rotation = turned(ranks[0] * 7 - 80, ranks[1] * 5 - 45, ranks[2] * 8 - 70)
        text = "".join(" ".join(f"{value:g}" for value in row) + " \n" for row in rotation)
        members[f"{stem}_pose.txt"] = text + "\n8 -4 878.9\n"
        members[f"{stem}_rgb.png"] = encode(number)
        members[f"{stem}_depth.bin"] = NOISE
        label = tuple(5 * angle + rank // 4 for angle, rank in enumerate(ranks))
        splits[where.get(sequence, "train")].append((number, label))
    write(folder, {"biwi-kinect-head-pose-database.zip": zipped(members)})
    return splits


def ddsm(folder):
    # patient key of the case list, pathology, and the pictures of that patient in the picture list
    cases = {
        "calc_case_description_train_set": [
            ("Calc-Training_P_00005_RIGHT_CC", "MALIGNANT", [0]),
            ("Calc-Training_P_00005_RIGHT_MLO", "BENIGN_WITHOUT_CALLBACK", [1]),
            ("Calc-Training_P_00007_LEFT_CC", "BENIGN", [2]), ("Calc-Training_P_00007_LEFT_CC", "MALIGNANT", []),
            ("Calc-Training_P_00008_LEFT_CC", "BENIGN", [])],
        "mass_case_description_train_set": [
            ("Mass-Training_P_00001_LEFT_CC", "MALIGNANT", [3, 4]), ("Mass-Training_P_00004_LEFT_CC", "BENIGN", [5]),
            ("Mass-Training_P_00009_LEFT_CC", "BENIGN_WITHOUT_CALLBACK", [6])],
        "calc_case_description_test_set": [("Calc-Test_P_00038_LEFT_CC", "BENIGN", [7])],
        "mass_case_description_test_set": [("Mass-Test_P_00016_LEFT_CC", "MALIGNANT", [8])]}
    pictures, members = [], {"csv/meta.csv": NOISE}
    for file, rows in cases.items():
        text = "patient_id,pathology,image file path,cropped image file path\n"
        for key, pathology, numbers in rows:  # paths end in a line break
            text += f'P_00001,{pathology},{key}/1.3.6/1.3.6/000000.dcm,"{key}_1/1.3.6/000001.dcm\n"\n'
            pictures += [(key, number) for number in numbers]
        members[f"csv/{file}.csv"] = text
    listed = "file_path,image_path,PatientID,SeriesDescription\n"
    for key, number in pictures:
        for name, whole in ((f"1-{number}.jpg", key), (f"2-{number}.jpg", f"{key}_1")):
            listed += f"x,CBIS-DDSM/jpeg/1.3.6.{number % 3}/{name},{whole},\n"
            members[f"jpeg/1.3.6.{number % 3}/{name}"] = encode(number if whole == key else 60, "JPEG", mode="L")
    members["csv/dicom_info.csv"] = listed + "x,CBIS-DDSM/jpeg/1.3.6.9/1-1.jpg,Calc-Training_P_00008_LEFT_CC,gone\n"
    write(folder, {"cbis-ddsm-breast-cancer-image-dataset.zip": zipped(members)})
    return {"train": list(enumerate([1, 2, 0, 1, 1, 0, 2])), "test": [(7, 0), (8, 1)]}


LAYOUTS = {"magellan_venus_volcanoes": magellan_venus_volcanoes, "brodatz": brodatz, "iaprtc12": iaprtc12,
           "tid2008": tid(2008, 17, 4, "MSSIM.TXT"), "tid2013": tid(2013, 24, 5, "MSSIM.txt"), "trancos": trancos, "awa2": awa2,
           "biwi": biwi, "ddsm": ddsm}
MODES = dict.fromkeys(("magellan_venus_volcanoes", "brodatz", "ddsm"), "L")
