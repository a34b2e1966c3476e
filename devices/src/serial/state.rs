//! Saved state of the port. The printed output stays with the process that printed it.

use super::uart::{BACKLOG, Fcr, Ier, Lcr, Mcr, Msr, Registers, Uart};
use crate::state::{StateError, check, message, narrow};

impl Uart {
    /// The registers, the FIFO and the input behind it.
    pub(super) fn save(&self) -> message::Serial {
        let Registers {
            ier,
            fcr,
            lcr,
            mcr,
            msr,
            scratch,
            divisor,
            overrun,
            break_received,
            transmitted,
            fifo,
        } = &self.registers;
        message::Serial {
            ier: ier.bits().into(),
            fcr: fcr.bits().into(),
            lcr: lcr.bits().into(),
            mcr: mcr.bits().into(),
            msr: msr.bits().into(),
            scratch: (*scratch).into(),
            divisor: u16::from_le_bytes(*divisor).into(),
            overrun: *overrun,
            transmitted: *transmitted,
            fifo: fifo.iter().copied().collect(),
            backlog: self.backlog.iter().copied().collect(),
            break_received: *break_received,
            break_after: self
                .break_after
                .map(|after| u32::try_from(after).unwrap_or(u32::MAX)),
        }
    }

    /// Takes over a saved state; the port is paused afterwards. Input that came meanwhile is kept behind the saved one.
    pub(super) fn restore(&mut self, saved: &message::Serial) -> Result<(), StateError> {
        let registers = registers(saved)?;
        check(
            saved.backlog.len() <= BACKLOG,
            "backlog",
            "more than the port keeps",
        )?;
        let break_after = match saved.break_after {
            Some(after) => {
                let after = narrow("break_after", after)?;
                check(
                    after <= saved.backlog.len(),
                    "break_after",
                    "behind the end of the backlog",
                )?;
                Some(after)
            }
            None => None,
        };
        let came = self.registers.fifo.drain(..).chain(self.backlog.drain(..));
        let backlog = saved.backlog.iter().copied().chain(came).take(BACKLOG).collect();
        self.backlog = backlog;
        self.break_after = break_after;
        self.registers = registers;
        self.pause();
        Ok(())
    }
}

fn registers(saved: &message::Serial) -> Result<Registers, StateError> {
    let unknown = |field| move || StateError::invalid(field, "unknown bits are set");
    let fcr = Fcr::from_bits(narrow("fcr", saved.fcr)?).ok_or_else(unknown("fcr"))?;
    let lasting = Fcr::ENABLE | Fcr::TRIGGER_LOW | Fcr::TRIGGER_HIGH;
    check(
        lasting.contains(fcr) && (fcr.is_empty() || fcr.contains(Fcr::ENABLE)),
        "fcr",
        "bits that do not last",
    )?;
    let divisor: u16 = narrow("divisor", saved.divisor)?;
    let mut registers = Registers {
        ier: Ier::from_bits(narrow("ier", saved.ier)?).ok_or_else(unknown("ier"))?,
        fcr,
        lcr: Lcr::from_bits_retain(narrow("lcr", saved.lcr)?),
        mcr: Mcr::from_bits(narrow("mcr", saved.mcr)?).ok_or_else(unknown("mcr"))?,
        msr: Msr::from_bits_retain(narrow("msr", saved.msr)?),
        scratch: narrow("scratch", saved.scratch)?,
        divisor: divisor.to_le_bytes(),
        overrun: saved.overrun,
        break_received: saved.break_received,
        transmitted: saved.transmitted,
        ..Registers::new()
    };
    check(
        saved.fifo.len() <= registers.depth(),
        "fifo",
        "longer than the FIFO",
    )?;
    registers.fifo.extend(&saved.fifo);
    Ok(registers)
}
