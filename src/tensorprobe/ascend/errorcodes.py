"""AI Core error codes and registers, in words."""

from __future__ import annotations

import re

import msgspec

# Position = bit. The first 64 are the code of every chip, the rest follows on chips since A2.
_NAMES = (
    "biu_l2_read_oob biu_l2_write_oob ccu_call_depth_ovrflw ccu_div0 ccu_illegal_instr "
    "ccu_loop_cnt_err ccu_loop_err ccu_neg_sqrt ccu_ub_ecc cube_invld_input cube_l0a_ecc "
    "cube_l0a_rdwr_cflt cube_l0a_wrap_around cube_l0b_ecc cube_l0b_rdwr_cflt cube_l0b_wrap_around "
    "cube_l0c_ecc cube_l0c_rdwr_cflt cube_l0c_self_rdwr_cflt cube_l0c_wrap_around ifu_bus_err "
    "mte_aipp_illegal_param mte_bas_raddr_obound mte_biu_rdwr_resp mte_cidx_overflow mte_decomp "
    "mte_f1wpos_larger_fsize mte_fmap_less_kernel mte_fmapwh_larger_l1size mte_fpos_larger_fsize "
    "mte_gdma_illegal_burst_len mte_gdma_illegal_burst_num mte_gdma_read_overflow "
    "mte_gdma_write_overflow mte_comp mte_illegal_fm_size mte_illegal_l1_3d_size "
    "mte_illegal_stride mte_l0a_rdwr_cflt mte_l0b_rdwr_cflt mte_l1_ecc mte_padding_cfg "
    "mte_read_overflow mte_rob_ecc mte_tlu_ecc mte_ub_ecc mte_unzip mte_write_3d_overflow "
    "mte_write_overflow vec_data_excp_ccu vec_data_excp_mte vec_data_excp_vec vec_div0 "
    "vec_illegal_mask vec_inf_nan vec_l0c_ecc vec_l0c_rdwr_cflt vec_neg_ln vec_neg_sqrt "
    "vec_same_blk_addr vec_ub_ecc vec_ub_self_rdwr_cflt vec_ub_wrap_around biu_dfx_err "
    "ccu_sbuf_ecc vec_col2img_rd_fm_addr_ovflow vec_col2img_rd_dfm_addr_ovfflow "
    "vec_col2img_illegal_fm_size vec_col2img_illegal_stride vec_col2img_illegal_1st_win_pos "
    "vec_col2img_illegal_fetch_pos vec_col2img_illegal_k_size ccu_inf_nan mte_illegal_schn_cfg "
    "mte_atm_addr_misalg vec_instr_addr_misalign vec_instr_illegal_cfg vec_instr_undef "
    "ccu_addr_err ccu_bus_err mte_err_addr_misalign mte_err_dw_pad_conf_err "
    "mte_err_dw_fmap_h_illegal mte_err_wino_l0b_write_overflow mte_err_wino_l0b_read_overflow "
    "mte_err_illegal_v_cov_pad_ctl mte_err_illegal_h_cov_pad_ctl mte_err_illegal_w_size "
    "mte_err_illegal_h_size mte_err_illegal_chn_size mte_err_illegal_k_m_ext_step "
    "mte_err_illegal_k_m_start_pos mte_err_illegal_smallk_cfg mte_err_read_3d_overflow "
    "ccu_veciq_ecc ccu_dc_data_ecc ccu_dc_tag_ecc ccu_div0_fp ccu_neg_sqrt_fp cnt_sw_bus_err "
    "fixp_err_instr_addr_misal fixp_err_illegal_cfg fixp_err_read_l0c_ovflw "
    "fixp_err_read_l1_ovflw fixp_err_read_ub_ovflw fixp_err_write_l1_ovflw "
    "fixp_err_write_ub_ovflw fixp_err_fbuf_write_ovflw fixp_err_fbuf_read_ovflw "
    "sc_reg_parity_err mte_err_fifo_parity mte_err_waitset ccu_err_parity_err mte_err_cache_ecc "
    "cube_err_hset_cnt_unf cube_err_hset_cnt_ovf mte_err_instr_illegal_cfg mte_err_hebcd "
    "mte_err_hebce mte_err_waipp ccu_seq_err ccu_mpu_err ccu_lsu_err ccu_pb_ecc_err "
    "mte_ub_wr_ovflw mte_ub_rd_ovflw cube_illegal_instr ccu_safety_crc_err mte_timeout "
    "mte_ub_rd_cflt mte_ub_wr_cflt mte_ktable_wr_addr_overflow mte_ktable_rd_addr_overflow "
    "ccu_ub_rd_cflt ccu_ub_wr_cflt ccu_ub_overflow_err biu_unsplit_err mte_stb_ecc_err "
    "mte_aipp_ecc_err ccu_lsu_atomic_err ccu_cross_core_set_ovfl_err fixp_err_out_write_overflow "
    "cube_err_pbuf_wrap_around fixp_l0c_ecc mte_err_l0c_rdwr_cflt vec_data_excpt_mte "
    "vec_data_excpt_su vec_data_excpt_vec vec_instr_timeout vec_instrs_undef vec_instr_ill_cfg "
    "vec_instr_misalign vec_instr_ill_mask vec_instr_ill_sqzn vec_ub_addr_wrap_around "
    "vec_ub_ecc_mberr vec_idata_inf_nan vec_div_by_zero vec_valu_neg_ln vec_valu_neg_sqrt "
    "vec_vci_idata_out_range vec_ill_vloop_op vec_ill_vloop_sreg vec_ld_num_mismatch "
    "vec_st_num_mismatch vec_ex_num_mismatch vec_ld_num_exceed_limit vec_st_num_exceed_limit "
    "vec_ill_instr_padding vec_ill_vga_vpd_order vec_ic_ecc_err vec_biu_resp_err "
    "vec_pb_ecc_mberr vec_pb_read_no_resp vec_valu_ill_issue vec_err_parity_err"
)
BIT_NAMES = tuple(_NAMES.split())

# Bits that a value of the input can set, so that the data deserves the first look.
DATA_BITS = frozenset({3, 7, 9, 52, 54, 57, 58, 72, 97, 98, 156, 157, 158, 159})

_UNITS = {
    "biu": "bus interface", "ccu": "scalar unit", "cube": "matrix unit", "cnt": "core controller",
    "ifu": "instruction fetch", "mte": "memory transfer", "vec": "vector unit",
    "fixp": "fix pipe", "sc": "core controller",
}  # fmt: skip

# The first that matches speaks.
_MEANINGS = (
    (r"_ecc|parity|_crc", "memory of the core is damaged: a hardware fault"),
    (r"inf_nan|invld_input", "an operand is NaN or Inf"),
    (r"neg_sqrt", "square root of a negative number"),
    (r"neg_ln", "logarithm of a negative number"),
    (r"div0|div_by_zero", "division by zero"),
    (
        r"biu_rdwr_resp",
        "the bus answered a read or write of global memory with an error: usually an address that "
        "is not, or no longer, allocated",
    ),
    (r"bus_err|resp_err|no_resp", "the bus answered with an error"),
    (r"cflt", "read and write of the same place at the same time: a missing synchronisation"),
    (r"misal", "an address is not aligned"),
    (
        r"oob|ov\w*fl\w*|overflow|wrap_around|obound|out_range|larger|exceed|data_excp|addr_err|mpu|_ovf|set_ovfl",
        "an address or a counter is out of its range",
    ),
    (r"lsu|unsplit|dfx", "an access to memory failed"),
    (r"timeout", "an instruction did not end in time"),
    (r"undef", "an instruction this core does not have"),
    (
        r"ill\w*|cfg|conf|param|less|mask|pad|stride|size|loop|mismatch|burst|seq|wait|heb|waipp|unf|same_blk|order|issue",
        "an instruction is illegal or wrongly configured",
    ),
    (r"comp|unzip", "compressed data is damaged"),
)

_SOC_TYPES = {
    0b000: "read poisoned data",
    0b001: "read out of bounds",
    0b010: "read answered by a bus error",
    0b011: "read from an address that belongs to nothing",
    0b101: "write out of bounds",
    0b110: "write answered by a bus error",
    0b111: "write to an address that belongs to nothing",
}


class ErrorBit(msgspec.Struct, frozen=True):
    """One set bit of an error code."""

    bit: int
    name: str
    meaning: str

    @property
    def unit(self) -> str:
        return self.name.split("_")[0]

    @property
    def points_at_data(self) -> bool:
        return self.bit in DATA_BITS

    @property
    def is_hardware(self) -> bool:
        return "hardware" in self.meaning


def decode_code(code: int) -> list[ErrorBit]:
    """The set bits of an error code, each in words. None at all: a timeout or a trap."""
    return [_bit(number) for number in range(code.bit_length()) if code >> number & 1]


def _bit(number: int) -> ErrorBit:
    if number >= len(BIT_NAMES):
        return ErrorBit(number, f"bit_{number}", "not known to this version")
    name = BIT_NAMES[number]
    unit = _UNITS.get(name.split("_")[0], "core")
    text = next((text for pattern, text in _MEANINGS if re.search(pattern, name)), "an error")
    return ErrorBit(number, name, f"{unit}: {text}")


def decode_register(name: str, value: int) -> str | None:
    """What a register of the core-error line says; None when it holds nothing of use."""
    unit = name.split()[0].lower()
    pc = (value & 0xFF) << 2
    if unit == "ifu":
        kind = _SOC_TYPES.get(value >> 48 & 7)
        return f"{kind}, address bits 47:2 = {value & 0xFFFFFFFFFFFC:#x}" if value else None
    if unit == "mte":
        kind = _SOC_TYPES.get(value >> 24 & 7)
        return f"{kind}, address bits 19:5 = {(value >> 8 & 0x7FFF) << 5:#x}, pc bits 9:2 = {pc:#x}"
    if unit == "biu":
        return f"address bits 24:0 = {value & 0x1FFFFFF:#x}" if value else None
    if unit == "ccu":
        return f"address bits 17:3 = {(value >> 8 & 0x7FFF) << 3:#x}, pc bits 9:2 = {pc:#x}"
    if unit == "cube":
        return f"address bits 17:9 = {(value >> 8 & 0x1FF) << 9:#x}, pc bits 9:2 = {pc:#x}"
    if unit == "vec":
        address = (value >> 16 & 0x1FFF) << 5
        return (
            f"address bits 17:5 = {address:#x}, repeat {value >> 8 & 0xFF}, pc bits 9:2 = {pc:#x}"
        )
    return None
