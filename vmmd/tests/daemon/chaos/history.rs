//! Calls as operations of the model.

use super::{
    calls::{Answer, Kind, NEVER, is_gone, refused},
    clients::Made,
    model::{Look, Op, Step, Time},
};

impl Made {
    pub fn op(&self, begin: Time, end: Time, steps: Vec<Step>, partial: bool) -> Op {
        Op {
            name: format!("client {} {:?} {}", self.client, self.call, self.mark),
            begin,
            end,
            ways: vec![steps],
            partial,
            repeats: None,
            disturbed: false,
        }
    }

    /// Operations of the call in the model.
    pub fn ops(&self, begin: Time, end: Time, answer: Option<&Answer>, repeats: Option<usize>) -> Vec<Op> {
        let uid = match (answer, self.call.kind) {
            (Some(Ok(response)), Kind::Create { .. }) => {
                let uid = response
                    .pointer("/vm/metadata/uid")
                    .and_then(serde_json::Value::as_str);
                Some(uid.unwrap().to_owned())
            }
            _ => None,
        };
        let steps = self.call.steps(self.mark, uid);
        let whole = |end, partial| Op {
            repeats,
            ..self.op(begin, end, steps.clone(), partial)
        };
        let part = |end| Op {
            repeats,
            ..self.op(begin, end, self.call.steps_of_part(self.mark), true)
        };
        let mut ops = match answer {
            _ if self.call.is_felt_later() => {
                let each = steps
                    .iter()
                    .map(|step| self.op(begin, NEVER, vec![step.clone()], true));
                each.collect()
            }
            None => vec![part(NEVER)],
            Some(Ok(_)) => vec![whole(end, false)],
            // The first attempt was carried out: this one has no way of its own.
            Some(answer) if is_gone(answer) => vec![Op {
                ways: Vec::new(),
                ..whole(end, false)
            }],
            Some(Err(status)) => {
                let (look, disturbed, partial) = refused(&self.call, status, self.generation);
                let op = match (partial, disturbed) {
                    (true, true) => part(end),
                    // An operation in progress may continue.
                    (true, false) => part(NEVER),
                    (false, _) => self.op(begin, end, vec![Step::Look(look)], false),
                };
                vec![Op { disturbed, ..op }]
            }
        };
        // The start of a new VM is not waited for.
        let begun = answer.is_none_or(Result::is_ok);
        if self.call.kind == (Kind::Create { start: true }) && begun {
            ops.push(self.op(begin, NEVER, vec![Step::Start], true));
        }
        ops
    }
}

type Doing = fn(&Step) -> bool;

/// Adds a way to successful calls, as they may have joined simultaneous calls of the same kind.
pub fn join(ops: &[Op]) -> Vec<Op> {
    let mut joined = ops.to_vec();
    for (index, op) in joined.iter_mut().enumerate() {
        let same = |steps: &[Step], step: Doing| steps.iter().any(step);
        let kinds: [(Doing, Look); 2] = [
            (|step| matches!(step, Step::Start), Look::NotDown),
            (|step| matches!(step, Step::Remove), Look::Absent),
        ];
        for (kind, look) in kinds {
            let mut others = ops.iter().enumerate().filter(|(other, _)| *other != index);
            let with = others.any(|(_, other)| {
                other.begin < op.end && op.begin < other.end && other.ways.iter().any(|way| same(way, kind))
            });
            if with && !op.partial && op.ways.first().is_some_and(|way| same(way, kind)) {
                op.ways.push(vec![Step::Look(look)]);
            }
        }
    }
    joined
}
