"""NPU ops for object detection: boxes, overlaps, suppression, pooling of regions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tensorprobe.replay.npu_op_table import OpTable, differentiate

OPS = OpTable()
Tensor = torch.Tensor

_TINY = 1e-9


def _corners(boxes: Tensor, trans: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Left, top, right, bottom of boxes given as rows; `trans`: as centre and size instead."""
    a, b, c, d = boxes.unbind(0)
    if trans:
        return a - c / 2, b - d / 2, a + c / 2, b + d / 2
    return a, b, c, d


def _overlap(a: Tensor, b: Tensor, trans: bool, mode: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Overlap ratio, union, and width and height of the box around both."""
    ax1, ay1, ax2, ay2 = _corners(a, trans)
    bx1, by1, bx2, by2 = _corners(b, trans)
    width = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).clamp(min=0)
    height = (torch.minimum(ay2, by2) - torch.maximum(ay1, by1)).clamp(min=0)
    shared = width * height
    area = (bx2 - bx1) * (by2 - by1)
    union = (ax2 - ax1) * (ay2 - ay1) + area - shared
    ratio = shared / ((union if mode == 0 else area) + _TINY)
    around_w = torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1)
    around_h = torch.maximum(ay2, by2) - torch.minimum(ay1, by1)
    return ratio, union, around_w, around_h


def _crossed(boxes: Tensor, others: Tensor, is_cross: bool) -> tuple[Tensor, Tensor]:
    """All pairs when `is_cross`, else the n-th with the n-th."""
    return (boxes[:, :, None], others[:, None, :]) if is_cross else (boxes, others)


def _shaped(result: Tensor, is_cross: bool) -> Tensor:
    return result if is_cross else result.unsqueeze(0)


def _centre_distance(a: Tensor, b: Tensor, trans: bool) -> Tensor:
    ax1, ay1, ax2, ay2 = _corners(a, trans)
    bx1, by1, bx2, by2 = _corners(b, trans)
    return ((ax1 + ax2 - bx1 - bx2) ** 2 + (ay1 + ay2 - by1 - by2) ** 2) / 4


@OPS.op()
def npu_iou(bboxes: Tensor, gtboxes: Tensor, mode: int = 0) -> Tensor:
    a, b = _crossed(gtboxes.T, bboxes.T, True)
    return _overlap(a, b, False, mode)[0]


@OPS.op(grad=True)
def npu_giou(
    input: Tensor, gtboxes: Tensor, trans: bool = False, is_cross: bool = False, mode: int = 0
) -> Tensor:
    a, b = _crossed(input, gtboxes, is_cross)
    ratio, union, around_w, around_h = _overlap(a, b, trans, mode)
    around = around_w * around_h
    return _shaped(ratio - (around - union) / (around + _TINY), is_cross)


@OPS.op(grad=True, backward_name="_npu_diou_backward")
def npu_diou(
    input: Tensor, gtboxes: Tensor, trans: bool = False, is_cross: bool = False, mode: int = 0
) -> Tensor:
    a, b = _crossed(input, gtboxes, is_cross)
    ratio, _, around_w, around_h = _overlap(a, b, trans, mode)
    diagonal = around_w**2 + around_h**2 + _TINY
    return _shaped(ratio - _centre_distance(a, b, trans) / diagonal, is_cross)


@OPS.op()
def npu_diou_backward(
    grad: Tensor,
    bboxes: Tensor,
    gtboxes: Tensor,
    trans: bool = False,
    is_cross: bool = False,
    mode: int = 0,
) -> tuple[Tensor, Tensor]:
    inputs = (bboxes, gtboxes, trans, is_cross, mode)
    grads = differentiate(npu_diou, inputs, (grad,), (True, True, False, False, False))
    return grads[0], grads[1]


@OPS.op(grad=True, backward_name="_npu_ciou_backward")
def npu_ciou(
    input: Tensor,
    gtboxes: Tensor,
    trans: bool = False,
    is_cross: bool = True,
    mode: int = 0,
    atan_sub_flag: bool = False,
) -> Tensor:
    a, b = _crossed(input, gtboxes, is_cross)
    ratio, _, around_w, around_h = _overlap(a, b, trans, mode)
    diagonal = around_w**2 + around_h**2 + _TINY
    ax1, ay1, ax2, ay2 = _corners(a, trans)
    bx1, by1, bx2, by2 = _corners(b, trans)
    turn = torch.atan((bx2 - bx1) / (by2 - by1 + _TINY)) - torch.atan(
        (ax2 - ax1) / (ay2 - ay1 + _TINY)
    )
    aspect = 4 / math.pi**2 * turn**2
    weight = (aspect / (1 - ratio + aspect + _TINY)).detach()
    return _shaped(ratio - _centre_distance(a, b, trans) / diagonal - weight * aspect, is_cross)


@OPS.op()
def npu_ciou_backward(
    grad: Tensor,
    bboxes: Tensor,
    gtboxes: Tensor,
    atan_sub: Tensor | None,
    trans: bool = False,
    is_cross: bool = True,
    mode: int = 0,
) -> tuple[Tensor, Tensor]:
    inputs = (bboxes, gtboxes, trans, is_cross, mode)
    grads = differentiate(npu_ciou, inputs, (grad,), (True, True, False, False, False))
    return grads[0], grads[1]


def _suppress(boxes: Tensor, scores: Tensor, threshold: float, limit: int) -> list[int]:
    """Indices of the boxes that survive, best score first."""
    survivors: list[int] = []
    for index in scores.argsort(descending=True, stable=True).tolist():
        if len(survivors) == limit:
            break
        overlaps = npu_iou(boxes[index : index + 1], boxes[survivors])
        if not survivors or float(overlaps.max()) <= threshold:
            survivors.append(index)
    return survivors


@OPS.op(
    "npu_nms_v4(Tensor input, Tensor scores, Scalar max_output_size, Tensor iou_threshold, "
    "Tensor scores_threshold, bool pad_to_max_output_size=False) -> (Tensor, Tensor)"
)
def npu_nms_v4(
    input: Tensor,
    scores: Tensor,
    max_output_size: int,
    iou_threshold: Tensor,
    scores_threshold: Tensor,
    pad_to_max_output_size: bool = False,
) -> tuple[Tensor, Tensor]:
    good = (scores > scores_threshold).nonzero().flatten()
    kept = _suppress(input[good], scores[good], float(iou_threshold), int(max_output_size))
    selected = good[kept].to(torch.int32)
    count = torch.tensor(len(kept), dtype=torch.int32)
    if pad_to_max_output_size:
        selected = F.pad(selected, [0, int(max_output_size) - len(kept)])
    return selected, count


@OPS.op("npu_nms_with_mask(Tensor input, Scalar iou_threshold) -> (Tensor, Tensor, Tensor)")
def npu_nms_with_mask(input: Tensor, iou_threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    kept = _suppress(input[:, :4], input[:, 4], float(iou_threshold), len(input))
    mask = torch.zeros(len(input), dtype=torch.uint8)
    mask[kept] = 1
    return input.clone(), torch.arange(len(input), dtype=torch.int32), mask


@OPS.op()
def npu_batch_nms(
    input: Tensor,
    scores: Tensor,
    score_threshold: float,
    iou_threshold: float,
    max_size_per_class: int,
    max_total_size: int,
    change_coordinate_frame: bool = False,
    transpose_box: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, _, classes = scores.shape
    boxes_out = input.new_zeros(batch, max_total_size, 4)
    scores_out = scores.new_zeros(batch, max_total_size)
    classes_out = scores.new_zeros(batch, max_total_size)
    counts = torch.zeros(batch, dtype=torch.int32)
    for image in range(batch):
        found: list[tuple[float, int, Tensor]] = []
        for kind in range(classes):
            boxes = input[image, :, min(kind, input.shape[2] - 1)]
            good = (scores[image, :, kind] > score_threshold).nonzero().flatten()
            kept = _suppress(boxes[good], scores[image, good, kind], iou_threshold,
                             max_size_per_class)  # fmt: skip
            found += [(float(scores[image, good[i], kind]), kind, boxes[good[i]]) for i in kept]
        found.sort(key=lambda each: -each[0])
        for place, (score, kind, box) in enumerate(found[:max_total_size]):
            boxes_out[image, place] = box
            scores_out[image, place] = score
            classes_out[image, place] = kind
        counts[image] = min(len(found), max_total_size)
    return boxes_out, scores_out, classes_out, counts


@OPS.op(
    "npu_bounding_box_encode(Tensor anchor_box, Tensor ground_truth_box, float means0, "
    "float means1, float means2, float means3, float stds0, float stds1, float stds2, float stds3)"
    " -> Tensor"
)
def npu_bounding_box_encode(anchor_box: Tensor, ground_truth_box: Tensor, *norm: float) -> Tensor:
    ax, ay, aw, ah = _centred(anchor_box)
    bx, by, bw, bh = _centred(ground_truth_box)
    deltas = torch.stack([(bx - ax) / aw, (by - ay) / ah, (bw / aw).log(), (bh / ah).log()], -1)
    return (deltas - deltas.new_tensor(norm[:4])) / deltas.new_tensor(norm[4:])


@OPS.op(
    "npu_bounding_box_decode(Tensor rois, Tensor deltas, float means0, float means1, "
    "float means2, float means3, float stds0, float stds1, float stds2, float stds3, "
    "int[1] max_shape, float wh_ratio_clip) -> Tensor"
)
def npu_bounding_box_decode(rois: Tensor, deltas: Tensor, *norm_shape_clip: Any) -> Tensor:
    *norm, shape, clip = norm_shape_clip
    deltas = deltas * deltas.new_tensor(norm[4:]) + deltas.new_tensor(norm[:4])
    ax, ay, aw, ah = _centred(rois)
    limit = abs(math.log(clip))
    dx, dy, dw, dh = deltas.unbind(-1)
    w, h = aw * dw.clamp(-limit, limit).exp(), ah * dh.clamp(-limit, limit).exp()
    x, y = ax + aw * dx, ay + ah * dy
    height, width = shape[0], shape[-1]
    return torch.stack(
        [
            (x - w / 2 + 0.5).clamp(0, width - 1),
            (y - h / 2 + 0.5).clamp(0, height - 1),
            (x + w / 2 - 0.5).clamp(0, width - 1),
            (y + h / 2 - 0.5).clamp(0, height - 1),
        ],
        -1,
    )


def _centred(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centre and size of boxes whose right and bottom pixels belong to them."""
    left, top, right, bottom = boxes.unbind(-1)
    return (left + right) / 2, (top + bottom) / 2, right - left + 1, bottom - top + 1


@OPS.op(grad=True)
def npu_roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sample_num: int,
    roi_end_mode: int,
) -> Tensor:
    points = sample_num if sample_num > 0 else 2
    pooled = []
    for roi in rois:
        left, top, right, bottom = (roi[1:] * spatial_scale).unbind()
        right, bottom = right + roi_end_mode * spatial_scale, bottom + roi_end_mode * spatial_scale
        across, down = pooled_width * points, pooled_height * points
        x = left + (torch.arange(across) + 0.5) * (right - left).clamp(min=1) / across
        y = top + (torch.arange(down) + 0.5) * (bottom - top).clamp(min=1) / down
        image = input[int(roi[0])]
        pooled.append(F.avg_pool2d(_sample(image, y[:, None], x[None, :]), points))
    return torch.stack(pooled)


def _sample(image: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Values of a (channels, height, width) image at points between its pixels; 0 outside."""
    height, width = image.shape[-2:]
    y, x = y + torch.zeros_like(x), x + torch.zeros_like(y)
    grid = torch.stack([2 * x / max(width - 1, 1) - 1, 2 * y / max(height - 1, 1) - 1], -1)
    return F.grid_sample(image[None], grid[None].to(image.dtype), align_corners=True)[0]


@OPS.op()
def npu_ps_roi_pooling(
    input: Tensor, rois: Tensor, spatial_scale: float, group_size: int, output_dim: int
) -> Tensor:
    """Each cell of a region is averaged over a channel of its own; `rois` is (batch, 5, count)."""
    height, width = input.shape[-2:]
    out = input.new_zeros(rois.shape[0] * rois.shape[2], output_dim, group_size, group_size)
    for number, roi in enumerate(rois.transpose(1, 2).reshape(-1, 5).tolist()):
        channels = input[int(roi[0])].view(output_dim, group_size, group_size, height, width)
        left, top = round(roi[1]) * spatial_scale, round(roi[2]) * spatial_scale
        cell_w = max((round(roi[3]) + 1) * spatial_scale - left, 0.1) / group_size
        cell_h = max((round(roi[4]) + 1) * spatial_scale - top, 0.1) / group_size
        for row in range(group_size):
            for column in range(group_size):
                y1, y2 = _span(top + row * cell_h, cell_h, height)
                x1, x2 = _span(left + column * cell_w, cell_w, width)
                if y2 > y1 and x2 > x1:
                    cell = channels[:, row, column, y1:y2, x1:x2]
                    out[number, :, row, column] = cell.mean((-1, -2))
    return out


def _span(start: float, length: float, limit: int) -> tuple[int, int]:
    first, last = math.floor(start), math.ceil(start + length)
    return min(max(first, 0), limit), min(max(last, 0), limit)


@OPS.op(
    "npu_deformable_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor? bias, "
    "int[2] kernel_size, int[] stride, int[] padding, int[4] dilation=1, int groups=1, "
    "int deformable_groups=1, bool modulated=True) -> (Tensor, Tensor)",
    grad=True,
)
def npu_deformable_conv2d(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int] | tuple[int, ...] = (1, 1, 1, 1),
    groups: int = 1,
    deformable_groups: int = 1,
    modulated: bool = True,
) -> tuple[Tensor, Tensor]:
    """Convolution of samples taken beside the grid; `offset` holds x, y and a weight for each."""
    if deformable_groups != 1:
        raise NotImplementedError("npu_deformable_conv2d: deformable_groups > 1 is not simulated")
    kh, kw = kernel_size
    rows, columns = offset.shape[-2:]
    dx, dy, mask = offset.view(len(offset), 3, kh, kw, rows, columns).unbind(1)
    top = torch.arange(rows) * stride[2] - padding[0]
    left = torch.arange(columns) * stride[3] - padding[2]
    y = top[:, None] + torch.arange(kh)[:, None, None, None] * dilation[2] + dy
    x = left[None, :] + torch.arange(kw)[:, None, None] * dilation[3] + dx
    samples = torch.stack(
        [
            _sample(image, yi.flatten(0, 2), xi.flatten(0, 2))
            for image, yi, xi in zip(input, y, x, strict=True)
        ]
    ).view(*input.shape[:2], kh, kw, rows, columns)
    if modulated:
        samples = samples * mask[:, None]
    spread = samples.permute(0, 1, 4, 2, 5, 3).reshape(*input.shape[:2], rows * kh, columns * kw)
    return F.conv2d(spread, weight, bias, stride=(kh, kw), groups=groups), spread


@OPS.op()
def npu_sub_sample(input: Tensor, per_images: int, positive_fraction: float) -> Tensor:
    """Labels with all but a balanced sample of positives (> 0) and negatives (0) set to -1."""
    positives = (input > 0).nonzero().flatten()[: int(per_images * positive_fraction)]
    negatives = (input == 0).nonzero().flatten()[: per_images - len(positives)]
    chosen = torch.full_like(input, -1)
    for kept in (positives, negatives):
        chosen[kept] = input[kept]
    return chosen


@OPS.op(
    "npu_anchor_response_flags(Tensor input, int[2] featmap_size, int[2] stride, "
    "int num_base_anchors) -> Tensor"
)
def npu_anchor_response_flags(
    input: Tensor, featmap_size: list[int], stride: list[int], num_base_anchors: int
) -> Tensor:
    """1 for every anchor of a cell that holds the centre of a box."""
    height, width = featmap_size
    column = ((input[:, 0] + input[:, 2]) / 2 / stride[0]).floor().long().clamp(0, width - 1)
    row = ((input[:, 1] + input[:, 3]) / 2 / stride[1]).floor().long().clamp(0, height - 1)
    flags = torch.zeros(height * width, dtype=torch.uint8)
    flags[row * width + column] = 1
    return flags[:, None].expand(-1, num_base_anchors).reshape(-1)


@OPS.op()
def npu_yolo_boxes_encode(
    input: Tensor, gt_bboxes: Tensor, stride: Tensor, performance_mode: bool = False
) -> Tensor:
    ax1, ay1, ax2, ay2 = input.unbind(-1)
    bx1, by1, bx2, by2 = gt_bboxes.unbind(-1)
    x = ((bx1 + bx2 - ax1 - ax2) / 2 / stride + 0.5).clamp(1e-6, 1 - 1e-6)
    y = ((by1 + by2 - ay1 - ay2) / 2 / stride + 0.5).clamp(1e-6, 1 - 1e-6)
    w = ((bx2 - bx1) / (ax2 - ax1)).clamp(min=1e-6).log()
    h = ((by2 - by1) / (ay2 - ay1)).clamp(min=1e-6).log()
    return torch.stack([x, y, w, h], -1)


@OPS.op()
def npu_grid_assign_positive(
    input: Tensor,
    overlaps: Tensor,
    box_responsible_flags: Tensor,
    max_overlaps: Tensor,
    argmax_overlaps: Tensor,
    gt_max_overlaps: Tensor,
    gt_argmax_overlaps: Tensor,
    num_gts: int,
    pos_iou_thr: float,
    min_pos_iou: float,
    gt_max_assign_all: bool,
) -> Tensor:
    """Number (from 1) of the box each anchor answers for, where it overlaps enough."""
    assigned = input.clone()
    responsible = box_responsible_flags.bool()
    positive = (max_overlaps > pos_iou_thr) & responsible
    assigned[positive] = (argmax_overlaps[positive] + 1).to(assigned.dtype)
    for box in range(num_gts):
        if float(gt_max_overlaps[box]) <= min_pos_iou:
            continue
        if gt_max_assign_all:
            assigned[(overlaps[box] == gt_max_overlaps[box]) & responsible] = box + 1
        elif responsible[gt_argmax_overlaps[box].long()]:
            assigned[gt_argmax_overlaps[box].long()] = box + 1
    return assigned
