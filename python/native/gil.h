#pragma once

#include <Python.h>
#include <unistd.h>

namespace qmlp_python {

// Lets other Python threads run while it lives.
//
// A daemon thread that wants the GIL back while the interpreter finalizes is ended by Python before
// 3.14 with pthread_exit, whose unwinding would meet nanobind's noexcept frames and abort the
// process. Such a thread waits here for the end of the process instead, as Python 3.14's own do.
class GilReleased {
 public:
  GilReleased() noexcept : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // pthread_exit's unwinding, which must not be left by a handler's end
      for (;;) pause();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace qmlp_python
